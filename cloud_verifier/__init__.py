"""Outrider: the cloud verifier. One packed forward for every session that is ready."""
