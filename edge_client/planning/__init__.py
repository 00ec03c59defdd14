"""`edge-client plan`: predictions from given or measured times. Pure but for `measure`."""
