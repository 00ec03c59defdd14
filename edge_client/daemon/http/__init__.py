"""The daemon's HTTP side: routes, access, server, page. Imports `openai`."""
