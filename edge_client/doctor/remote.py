"""Checks the verifier: that it is one, that it speaks our protocol, its distance, its credentials and its
clock."""

from __future__ import annotations

import socket
import statistics
from dataclasses import asdict, dataclass

from outrider.common.errors import LinkError, LinkFaultError, OutriderError
from outrider.common.process.memory import show_memory
from outrider.common.types import PROTOCOL_VERSION, ModelInfo
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.doctor.finding import Finding, fault, ok, skipped, warning
from outrider.edge_client.transport.link.base import UnreadableAnswerError
from outrider.edge_client.transport.link.probe import Probe, probe
from outrider.edge_client.transport.link.security import LinkSecurity, link_security
from outrider.edge_client.transport.link.targets import parse_target

_TIMEOUT_S = 5.0
_SNIFF_S = 1.0
_FAR_CLOCK_MS = 5_000.0


@dataclass(frozen=True, slots=True)
class RemoteResult:
    """Holds the findings, and the verifier's description; None where it did not answer."""

    findings: list[Finding]
    model: ModelInfo | None


def check_remote(config: RunConfig) -> RemoteResult:
    """Calls the verifier a few times and returns what was found."""
    try:
        security = link_security(config.connection, config.verifier)
    except OutriderError as error:
        return RemoteResult([fault("credentials", str(error), "correct these flags or files")], None)
    try:
        found = probe(config.verifier, security, timeout_s=_TIMEOUT_S)
    except OutriderError as error:
        return RemoteResult([_explain(config.verifier, security, error)], None)
    checks = [
        ok("verifier", _name(found.model), model=found.model.model_id, version=found.model.server_version),
        _tell_memory(found.model),
        _check_protocol(found.model),
        _check_security(security),
        _check_link(found),
        _check_clocks(found),
    ]
    return RemoteResult(checks, found.model)


def _name(model: ModelInfo) -> str:
    labels = f", {', '.join(model.labels)}" if model.labels else ""
    rows = "" if model.is_reproducible else ", not reproducible"
    quantised = f", {model.quantisation} weights" if model.quantisation else ""
    kv = "" if model.kv_dtype in ("", model.dtype) else f", KV in {model.kv_dtype}"
    where = f"{model.dtype}{quantised}{kv}{rows}, {model.device}, context {model.limits.max_context}"
    return f"{model.model_id} ({where}), version {model.server_version}{labels}"


def _tell_memory(model: ModelInfo) -> Finding:
    if model.memory is None:
        return skipped("memory", "this verifier does not tell its memory")
    return ok("memory", f"its {show_memory(model.memory)}", **asdict(model.memory))


def _explain(address: str, security: LinkSecurity, error: OutriderError) -> Finding:
    found = error.found
    if isinstance(error, LinkFaultError):
        return fault("verifier", found, error.fix or "both sides must agree on TLS, names and certificates")
    if isinstance(error, UnreadableAnswerError):
        return fault("protocol", found, _UPGRADE)
    if not isinstance(error, LinkError):  # CallRejectedError: it heard us and said no
        if error.fix:
            return fault("token", found, f"{error.fix}; `cloud-verifier token new` makes one there")
        return fault("verifier", found, f"is {address} a verifier's port? See --listen there")
    if "refused" in found:
        todo = f"start it there: cloud-verifier serve --listen {address}; or name its address with --verifier"
        return fault("verifier", found, todo)
    if "no such host" in found:
        return fault("verifier", found, "correct --verifier, or mend this machine's name service")
    speaks = None if security.is_tls else sniff(address)
    if speaks:
        todo = "this is another service's port (the verifier's admin port?): see --listen there"
        return fault("verifier", f"{address} speaks {speaks}, not gRPC", todo)
    todo = error.fix or "is the host up, and do the firewalls on the way let TCP through?"
    return fault("verifier", found, todo)


def sniff(address: str) -> str | None:
    """Returns the protocol that another service at this address speaks; None where it does not show."""
    try:
        with socket.create_connection(parse_target(address).addresses[0], _SNIFF_S) as connection:
            connection.settimeout(_SNIFF_S)
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            answer = connection.recv(16)
    except OSError:
        return None
    if answer.startswith(b"HTTP/"):
        return "HTTP/1"
    return "SSH" if answer.startswith(b"SSH-") else None


_UPGRADE = "install the same version of Outrider on both sides"


def _check_protocol(model: ModelInfo) -> Finding:
    theirs = model.protocol_version
    facts: dict[str, object] = {"theirs": theirs, "ours": PROTOCOL_VERSION}
    if theirs == PROTOCOL_VERSION:
        return ok("protocol", f"version {theirs} on both sides", **facts)
    older = "the verifier's is older" if theirs < PROTOCOL_VERSION else "this edge's is older"
    found = f"it speaks version {theirs}, this edge {PROTOCOL_VERSION}: {older}"
    return fault("protocol", found, _UPGRADE, **facts)


def _check_security(security: LinkSecurity) -> Finding:
    has_token = bool(security.metadata())
    token = "a token" if has_token else "no token"
    if security.is_tls:
        client = ", a client certificate" if security.certificate else ""
        return ok("credentials", f"TLS{client}, {token}", tls=True, token=has_token)
    return ok("credentials", f"no TLS, {token}; it asks for nothing more", tls=False, token=has_token)


def _check_link(found: Probe) -> Finding:
    times = sorted(found.answers_ms)
    rtt_ms = statistics.median(times)
    jitter_ms = times[-1] - times[0]
    facts: dict[str, object] = {
        "rtt_ms": round(rtt_ms, 2),
        "rtt_min_ms": round(times[0], 2),
        "jitter_ms": round(jitter_ms, 2),
        "connect_ms": round(found.connect_ms, 2),
    }
    text = f"round trip {rtt_ms:.1f} ms, {times[0]:.1f} to {times[-1]:.1f}"
    text += f"; connecting {found.connect_ms:.0f} ms"
    if jitter_ms > max(20.0, 2 * rtt_ms):
        todo = "times vary a lot: a wired link, or --timeout-ms above the default, avoids needless fallbacks"
        return warning("link", text, todo, **facts)
    return ok("link", text, **facts)


def _check_clocks(found: Probe) -> Finding:
    ahead = found.clock_ahead_ms
    if ahead is None:
        return skipped("clocks", "this verifier does not tell its time")
    side = "ahead of" if ahead > 0 else "behind"
    text = f"the verifier's is {abs(ahead):.0f} ms {side} this machine's"
    if abs(ahead) > _FAR_CLOCK_MS:
        todo = "run an NTP client on both; certificates and tokens expire by these clocks"
        return warning("clocks", text, todo, ahead_ms=round(ahead))
    return ok("clocks", text, ahead_ms=round(ahead))
