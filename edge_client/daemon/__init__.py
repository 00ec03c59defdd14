"""`edge-client serve`: the decode loop behind OpenAI's HTTP interface. Imported by that verb alone."""
