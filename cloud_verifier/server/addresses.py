"""Checks where a verifier listens: on loopback freely, beyond it with encryption and credentials."""

from __future__ import annotations

from outrider.cloud_verifier.config import ServeConfig
from outrider.common.config.addresses import check_unused, is_loopback, split_address
from outrider.common.errors import UsageError

ADMIN_OFF = ("", "none")


def check_addresses(config: ServeConfig) -> tuple[str, str | None]:
    """Returns the address to serve at, and the admin port's, None where it is off.

    Raises `UsageError` for a malformed address, for TLS flags that lack another, and for an address beyond
    loopback without encryption and credentials, unless `--insecure`.
    """
    _check_pairs(config)
    if config.probe_listen not in ADMIN_OFF:
        split_address(config.probe_listen, "--probe-listen", "0.0.0.0:7076")
    missing = {
        "encryption (--tls-cert and --tls-key)": config.tls_cert is None,
        "credentials (--tokens, or --tls-client-ca)": config.tokens is None and config.tls_client_ca is None,
    }
    _check_listen(config.listen, "--listen", missing, config.insecure)
    if config.admin_listen in ADMIN_OFF:
        return config.listen, None
    missing = {
        "encryption (--tls-cert and --tls-key)": config.tls_cert is None,
        "a file of tokens (--tokens), with one of `cloud-verifier token new --admin`": config.tokens is None,
    }
    _check_listen(config.admin_listen, "--admin-listen", missing, config.insecure)
    return config.listen, config.admin_listen


def check_ports_free(config: ServeConfig) -> None:
    """Raises `UsageError` where one of them cannot be bound, before loading weights takes its time."""
    for address, flag in (
        (config.listen, "--listen"),
        (config.admin_listen, "--admin-listen"),
        (config.probe_listen, "--probe-listen"),
    ):
        if address not in ADMIN_OFF:
            check_unused(address, flag)


def _check_pairs(config: ServeConfig) -> None:
    if config.tls_cert is not None and config.tls_key is None:
        raise UsageError(f"--tls-cert {config.tls_cert}: needs its private key, --tls-key FILE")
    if config.tls_key is not None and config.tls_cert is None:
        raise UsageError(f"--tls-key {config.tls_key}: needs its certificate, --tls-cert FILE")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise UsageError("--tls-client-ca: client certificates need TLS here too: --tls-cert and --tls-key")


def _check_listen(listen: str, flag: str, missing: dict[str, bool], is_insecure_allowed: bool) -> None:
    host, _ = split_address(listen, flag)
    lacks = [what for what, is_missing in missing.items() if is_missing]
    if lacks and not is_insecure_allowed and not is_loopback(host):
        raise UsageError(
            f"{flag} {listen}: is beyond this machine and lacks {' and '.join(lacks)}; "
            "`cloud-verifier cert dev` and `cloud-verifier token new` make them. "
            "Add --insecure if the network is yours and trusted"
        )
