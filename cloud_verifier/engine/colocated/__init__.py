"""Co-located speculation: what drafts beside the target, and for whom. Imports `edge_client.drafting`, `heads`, and
of the engine `job`, `threads` and `work`."""
