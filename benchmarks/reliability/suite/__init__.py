"""The test suite itself, alone and on a busy machine."""
