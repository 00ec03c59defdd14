"""The verifier's configuration: one frozen dataclass, from which flags, YAML keys and variables come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, help_text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """`cloud-verifier serve`."""

    target: str = _option("", "Hugging Face model directory; default: the embedded target", metavar="DIR")
    listen: str = _option(
        "127.0.0.1:7077", "address to serve on; port 0 picks a free one", metavar="HOST:PORT"
    )
    insecure: bool = _option(False, "serve beyond loopback without encryption")
    device: str = _option("cpu", "where the target runs", choices=("cpu", "cuda"))
    dtype: str = _option(
        "auto",
        "of the weights and the arithmetic; auto is float32 on a CPU, bfloat16 on CUDA",
        choices=("auto", "float32", "bfloat16"),
    )
    num_threads: int = _option(0, "CPU threads of the forward; 0 is one per core", metavar="N")
    kv_tokens: int = _option(65_536, "size of the KV pool in tokens, shared by all sessions", metavar="N")
    max_step_tokens: int = _option(512, "tokens in one packed forward at most", metavar="N")
    max_draft_tokens: int = _option(64, "drafted tokens in one round at most", metavar="N")
    max_message_bytes: int = _option(1 << 20, "size of one message at most", metavar="BYTES")
    max_sessions: int = _option(1024, "sessions held at once", metavar="N")
    session_idle_ttl_s: float = _option(600.0, "a session silent for longer is forgotten", metavar="S")
    drain_grace_s: float = _option(10.0, "how long a stop waits for open sessions", metavar="S")
    min_forward_ms: float = _option(
        0.0,
        "stretch every forward to this, to stand for a larger target; results carry the label",
        metavar="MS",
    )
    log_level: str = _option("info", "how much to log", choices=("debug", "info", "warning", "error"))
    log_json: bool = _option(False, "log one JSON object a line")
