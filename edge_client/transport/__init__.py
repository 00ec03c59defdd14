"""The connection to a verifier: links, requests in flight, reconnection, deadlines. Imports `common` alone."""
