"""The verifier process: command line, admin port, supervision. Imports every other room."""
