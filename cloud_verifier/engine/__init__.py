"""Sessions, admission, scheduling and the step. Imports `backends`, `verification`, `security.metadata`, `config`."""
