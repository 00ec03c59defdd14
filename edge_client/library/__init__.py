"""The client of `outrider.connect`, for Python programs. Imports session, config and all below."""
