"""A session, and the factory that makes it from a configuration. Imports config, decode and all below."""
