"""Outrider: what both sides must agree on. numpy only; imports none of our other packages."""
