"""Trains heads that draft for a target at the verifier. Imports `cloud_verifier.heads`, whose modules are served."""
