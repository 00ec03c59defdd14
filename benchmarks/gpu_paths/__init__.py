"""`make bench-gpu-paths`: what can be measured of the GPU's paths without a GPU."""
