"""The process behind a link: `python -m outrider.experiments.links.helper JSON`, started by `remote.py`.

Prints one line of JSON with the address, then answers a line of JSON to each line on its standard input, and
ends with that. It asks for a real-time priority: the link must not slow down because the models are at work.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import selectors
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from outrider.common.errors import OutriderError
from outrider.experiments.links.priority import ask_for_real_time
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.profiles import load_profile

_SERVERS = {
    "proxy": "outrider.experiments.links.proxy.server",
    "tun": "outrider.experiments.links.tun.server",
    "netem": "outrider.experiments.links.netem.server",
}


class _Served(Protocol):
    """Is what a server module's `serve(profile, upstream)` yields."""

    @property
    def address(self) -> str: ...
    def facts(self) -> dict[str, Any]: ...
    def wire_bytes(self) -> tuple[int, int]: ...
    def restart_outages(self) -> None: ...
    def reset(self) -> int: ...


def answer(served: _Served, what: str) -> dict[str, Any]:
    """Answers one line of standard input, as the methods of `RemoteLink` send it."""
    if what == "facts":
        return served.facts()
    if what == "wire_bytes":
        up, down = served.wire_bytes()
        return {"up": up, "down": down}
    if what == "restart_outages":
        served.restart_outages()
        return {}
    if what == "reset":
        return {"num_connections": served.reset()}
    return {"error": f"unknown request {what!r}"}


async def _input_lines() -> AsyncIterator[str]:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().strip()


async def _serve(realisation: str, profile: LinkProfile, upstream: str) -> None:
    module = importlib.import_module(_SERVERS[realisation])
    opening: AbstractAsyncContextManager[_Served] = module.serve(profile, upstream)
    async with opening as served:
        facts = {"realisation": realisation, "scheduling": ask_for_real_time()}
        _say({"address": served.address, "facts": facts})
        async for line in _input_lines():
            _say(answer(served, line))


def _make_loop() -> asyncio.AbstractEventLoop:
    """Returns a loop of select(2), which takes microseconds; the default epoll rounds timers up to whole
    milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main() -> int:
    """Runs the command."""
    request = json.loads(sys.argv[1])
    try:
        with asyncio.Runner(loop_factory=_make_loop) as runner:
            runner.run(_serve(request["realisation"], load_profile(request["profile"]), request["upstream"]))
    except (OutriderError, OSError) as error:
        _say({"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
