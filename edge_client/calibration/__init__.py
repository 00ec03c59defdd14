"""`edge-client calibrate`: a gate's thresholds, and what the gate saves and costs. Imports session, config and
all below."""
