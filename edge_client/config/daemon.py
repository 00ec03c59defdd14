"""Defines the section `serve` of the configuration, for `edge-client serve`."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.common.config.loader import option

SECTION = "serve"


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """Configures the daemon: keys `serve.*` of YAML, variables OUTRIDER_EDGE_SERVE_*, flags of the verb
    `serve` alone."""

    listen: str = option("127.0.0.1:7079", "where to answer HTTP", metavar="HOST:PORT")
    insecure: bool = option(False, "listen beyond loopback without an API key")
    api_key_file: str = option(
        "", "file with the API keys that clients must send, one a line; # begins a comment", metavar="FILE"
    )
    api_key: str = option(
        "", "an API key; from the environment or a file, never a flag", is_flag=False, is_secret=True
    )
    cors_origin: tuple[str, ...] = option(
        (), "origin of web pages that may call from a browser; may be repeated, * is any", metavar="ORIGIN"
    )
    allowed_host: tuple[str, ...] = option(
        (), "another host name that clients may use for this daemon; may be repeated", metavar="NAME"
    )
    model_name: str = option("outrider", "name of the model in /v1/models and requests", metavar="NAME")
    chat_template: str = option(
        "", "Jinja file to use instead of the tokenizer's own chat template", metavar="FILE"
    )
    chat_template_kwargs: str = option(
        "",
        "values for the chat template's own variables, such as {\"enable_thinking\": false}; a request's "
        "chat_template_kwargs go before them",
        metavar="JSON",
    )
    strict_requests: bool = option(
        False, "refuse requests with fields that nothing here knows, which are ignored otherwise"
    )
    max_requests: int = option(4, "most requests generating at once", metavar="N", minimum=1, maximum=256)
    max_queue: int = option(
        64, "most requests waiting for their turn; more are refused with 429", metavar="N", minimum=0
    )
    max_body_mb: float = option(8.0, "largest request body", metavar="MB", minimum=0.001, maximum=1024)
    read_timeout_s: float = option(
        30.0,
        "time for a client to send a complete request, or its next one, before it is cut off",
        metavar="S",
        minimum=0.1,
        maximum=3600,
    )
    write_timeout_s: float = option(
        20.0,
        "time for a client to read anything before it is cut off",
        metavar="S",
        minimum=0.1,
    )
    stop_grace_s: float = option(
        30.0, "time for running requests to finish after SIGTERM", metavar="S", minimum=0
    )
    draft_cache_mb: float = option(
        256.0,
        "memory for the draft's KV of finished texts, reused by the next turn of a conversation",
        metavar="MB",
        minimum=0,
    )
    log_json: bool = option(False, "log JSON objects instead of lines")
