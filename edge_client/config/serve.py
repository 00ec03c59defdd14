"""What `edge-client serve` adds to the edge's configuration: the section `serve`."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.common.config.loader import option

SECTION = "serve"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Keys `serve.*` of YAML, variables OUTRIDER_EDGE_SERVE_*, flags of the verb `serve` alone."""

    listen: str = option("127.0.0.1:7079", "where to answer HTTP", metavar="HOST:PORT")
    insecure: bool = option(False, "listen beyond loopback without an API key")
    api_key_file: str = option(
        "", "file with the API keys that clients must show, one a line; # begins a comment", metavar="FILE"
    )
    api_key: str = option(
        "", "one such key itself; from the environment or a file, never a flag", is_flag=False, is_secret=True
    )
    cors_origin: tuple[str, ...] = option(
        (), "origin of a web page that may call from a browser; may be repeated, * is any", metavar="ORIGIN"
    )
    allowed_host: tuple[str, ...] = option(
        (), "further name that clients may call this daemon by; may be repeated", metavar="NAME"
    )
    model_name: str = option("outrider", "what /v1/models and requests call the model", metavar="NAME")
    chat_template: str = option(
        "", "Jinja file to use instead of the tokenizer's own chat template", metavar="FILE"
    )
    max_requests: int = option(4, "requests generating at once", metavar="N", minimum=1, maximum=256)
    max_queue: int = option(
        64, "requests waiting for one of these; more are refused with 429", metavar="N", minimum=0
    )
    max_body_mb: float = option(8.0, "largest request body", metavar="MB", minimum=0.001, maximum=1024)
    read_timeout_s: float = option(
        30.0,
        "a client whose request is not whole after so long is cut off, and so is one that keeps silent",
        flag="--read-timeout",
        metavar="S",
        minimum=0.1,
        maximum=3600,
    )
    write_timeout_s: float = option(
        20.0,
        "a client that reads nothing for so long is cut off",
        flag="--write-timeout",
        metavar="S",
        minimum=0.1,
    )
    stop_grace_s: float = option(
        30.0, "how long running requests may go on after SIGTERM", flag="--stop-grace", metavar="S", minimum=0
    )
    draft_cache_mb: float = option(
        256.0,
        "memory for the draft's KV of texts that ended, for the next turn of a conversation",
        metavar="MB",
        minimum=0,
    )
    log_json: bool = option(False, "log JSON objects instead of lines")
