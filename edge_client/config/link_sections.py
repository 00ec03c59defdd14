"""Sections of the configuration about the link: the connection, outages, and logs and traces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.common.config.loader import option
from outrider.edge_client.core.options import OnTimeout


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """Configures the connection to the verifier: transport, TLS and credentials."""

    transport: Literal["stream", "unary"] = option(
        "stream",
        "one stream for each session, or single calls for networks that break streams",
        title="when the link fails",
    )
    tls: bool = option(False, "use TLS with the authorities that this machine trusts")
    tls_ca: Path | None = option(
        None, "use TLS with this authority for the verifier's certificate; PEM", metavar="FILE"
    )
    tls_cert: Path | None = option(
        None, "certificate of this edge, where the verifier requires one; PEM", metavar="FILE"
    )
    tls_key: Path | None = option(None, "private key of --tls-cert; PEM, without a password", metavar="FILE")
    tls_server_name: str = option(
        "", "name that the verifier's certificate must have; empty is the host of --verifier", metavar="NAME"
    )
    token_file: Path | None = option(
        None, "file with the token of `cloud-verifier token new`; read at each connection", metavar="FILE"
    )
    token: str = option("", "the token itself", is_flag=False, is_secret=True)
    insecure_token: bool = option(
        False, "send the token unencrypted beyond this machine; for networks you trust"
    )


@dataclass(frozen=True, slots=True)
class OutageConfig:
    """Configures what is done when the verifier does not answer in time."""

    on_timeout: OnTimeout = option(
        OnTimeout.FIRST_TOKEN,
        "when a round has no answer by its deadline: keep the draft's first token, marked unverified "
        "(first_token); continue with the draft alone, marked (edge_only); wait, exact (wait); or end with "
        "an error (fail). `serve` waits unless told otherwise, since few of its clients show marks",
    )
    timeout_ms: float | None = option(
        None,
        "deadline of a round; none: 400 ms, or twice what recent rounds took",
        metavar="MS",
        minimum=1,
        maximum=86_400_000,  # a day: what waits and what goes over the wire can be counted
    )
    recover_timeout_s: float = option(
        60.0,
        "seconds to wait for a lost link or session before giving up",
        metavar="S",
        minimum=0.1,
        maximum=604_800.0,
    )
    reverify: bool = option(
        False,
        "verify kept tokens once the link is back, and take the text back to the first one that the target "
        "rejects; a pipe, and the daemon's clients, then get text only once it is verified. Needs --method "
        "coupled",
    )
    allow_target_change: bool = option(False, "continue when the verifier comes back with another target")


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Configures logs and traces."""

    level: Literal["debug", "info", "warning", "error"] = option("warning", "how much to log, on stderr")
    otlp_endpoint: str = option(
        "",
        "collector to send OpenTelemetry spans to; needs the otel extra",
        metavar="URL",
        key="otlp_endpoint",
    )
