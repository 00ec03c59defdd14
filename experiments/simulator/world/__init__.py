"""Virtual time, and the clock, threads and pools that product code is given in it."""
