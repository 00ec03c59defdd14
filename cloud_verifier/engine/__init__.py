"""Sessions, admission, scheduling and the step. Imports `verification`, `backends`, `kv`."""
