"""The realisation without privileges: a TCP proxy on loopback."""
