"""Who may call a verifier, and over what: tokens, certificates, interceptors."""
