"""The edge's configuration: one dataclass in sections, parsed once. Imports controller, core, drafting and gate."""
