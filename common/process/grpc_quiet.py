"""Turns gRPC's own lines on stderr off, unless GRPC_VERBOSITY is set.

Its core reports every failed TLS handshake there, past our log: a scan of the port would flood the verifier's
log, and the edge reports the fault in one sentence anyway. Import this before `grpc`, which reads the
variable once. GRPC_VERBOSITY=INFO brings the lines back.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
