"""Outrider: distributed speculative decoding. An edge drafts with INT4 weights, a cloud verifies."""

from __future__ import annotations

from outrider.common.process.version import own_version

__version__ = own_version()
