"""`edge-client doctor`: checks, each with what it found and what to do. Imports session, config and all below."""
