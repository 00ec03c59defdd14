"""A veth pair between this namespace and one without a name, `tc netem` on either end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from outrider.common.config.addresses import split_address
from outrider.common.errors import UsageError
from outrider.experiments.links.base import kernel_facts
from outrider.experiments.links.namespaces import (
    Namespace,
    free_addresses,
    ip,
    listen_in,
    pick_congestion_control,
    run_tool,
    set_up_device,
)
from outrider.experiments.links.netem.realisation import netem_command
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.proxy.server import ProxyServer

FAR_DEVICE = "orn"


class _NetemServer:
    def __init__(self, device: str, relay: ProxyServer, address: str, facts: dict[str, Any]) -> None:
        self.address = address
        self._statistics = Path("/sys/class/net") / device / "statistics"
        self._relay, self._facts = relay, facts

    def facts(self) -> dict[str, Any]:
        return self._facts

    def wire_bytes(self) -> tuple[int, int]:
        """Returns the device's counts, with Ethernet headers; up is what entered the link."""
        up, down = ((self._statistics / f"{way}_bytes").read_text() for way in ("tx", "rx"))
        return int(up), int(down)

    def restart_outages(self) -> None:
        """Does nothing: there are none."""

    def reset(self) -> int:
        return self._relay.reset()


def _make_veth(namespace: Namespace, near: str, far: str, control: str) -> str:
    device = f"orn{os.getpid()}"
    ip("link", "add", device, "type", "veth", "peer", "name", FAR_DEVICE, "netns", namespace.path)
    set_up_device(device, near, far, control)
    with namespace.entered():
        set_up_device(FAR_DEVICE, far, near, control)
    return device


@contextlib.asynccontextmanager
async def serve(profile: LinkProfile, upstream: str) -> AsyncIterator[_NetemServer]:
    """Opens the link to `upstream` for as long as the context lasts."""
    target = split_address(upstream, "--upstream")
    near, far = free_addresses()
    control = pick_congestion_control()
    namespace = Namespace()
    device = _make_veth(namespace, near, far, control)
    _run_netem(profile, namespace, device)
    relay = ProxyServer(LinkProfile(), target)
    await relay.listen(listen_in(namespace, (far, target[1]), control))
    facts = {**kernel_facts(), "congestion_control": control, "queue": "bounded in packets, not bytes"}
    try:
        yield _NetemServer(device, relay, f"{far}:{target[1]}", facts)
    finally:
        relay.close()
        with contextlib.suppress(UsageError):
            ip("link", "del", device)
        namespace.close()


def _run_netem(profile: LinkProfile, namespace: Namespace, device: str) -> None:
    run_tool(*netem_command(profile, device, is_up=True))
    with namespace.entered():
        run_tool(*netem_command(profile, FAR_DEVICE, is_up=False))
