"""Speculative decoding as one object: `SpeculativeDecoder`, in this process or with a remote verifier. Imports both
sides; what needs torch when a target is loaded here."""
