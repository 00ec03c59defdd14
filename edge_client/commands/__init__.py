"""One module a verb of `edge-client`."""
