"""What `edge-client calibrate` finds: a gate's thresholds, and what the gate saves and costs."""
