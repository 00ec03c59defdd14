"""`make bench-quantised`: quantised targets, drafts and KV on a CPU."""
