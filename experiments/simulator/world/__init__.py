"""Virtual time and the product's modules in it."""
