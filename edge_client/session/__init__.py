"""`EdgeSession` and the factory that builds it from a configuration."""
