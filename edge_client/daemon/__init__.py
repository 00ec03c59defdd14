"""`edge-client serve`: sessions behind OpenAI's HTTP interface. Imports session, config and all below."""
