"""The configuration loader and the value parsers that both commands share: fields, flags, addresses, units."""
