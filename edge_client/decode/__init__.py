"""Decoding one sequence: the speculative loop, cloud-only, opening, fallback and re-verification."""
