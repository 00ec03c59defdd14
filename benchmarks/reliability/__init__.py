"""What is promised under faults, overload, hostile clients and long runs: `make bench-reliability`."""
