"""The edge's configuration: one dataclass a section, parsed once."""
