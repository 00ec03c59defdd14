"""A bare bidirectional gRPC echo between two processes: what a round's messages cost without the product.

The server is what a verifier's is (`grpc.aio` on uvloop, its options), the client what an edge's is (its channel,
a stream of gRPC's synchronous interface, whose requests come out of a queue). Before it sends, the client is busy
for as long as the drafts of a recorded round took, and the server, before it answers, for as long as its forward.
Both are busy, since a core that sleeps takes longer to wake than one that just computed, and read as much memory
as the models have, since code that a model has driven out of the caches runs slower.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import uvloop

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.server.entrance import server_options
from outrider.edge_client.transport.link.channel import open_channel
from outrider.experiments.shared.processes import VerifierProcess, start_server

METHOD = "/echo.Echo/Echo"
_ASKED = struct.Struct("<QI")  # the pause to make in ns, the size of the answer
_MADE = struct.Struct("<Q")  # the pause that was made
_CHUNK_FLOATS = 1 << 18


@dataclass(frozen=True, slots=True)
class Exchange:
    """Describes one exchange of messages: their sizes in bytes, and how long each side is busy before it sends."""

    bytes_up: int
    bytes_down: int
    client_ns: int
    server_ns: int


class Busy:
    """Computes for a time, over as much memory as a model of `num_bytes` has."""

    def __init__(self, num_bytes: int) -> None:
        self._chunks = np.ones((max(1, num_bytes // 4 // _CHUNK_FLOATS), _CHUNK_FLOATS), np.float32)
        self._next = 0

    def pause(self, pause_ns: int) -> int:
        """Is busy for `pause_ns` or a little longer; returns for how long."""
        start_ns = now_ns = time.perf_counter_ns()
        while now_ns - start_ns < pause_ns:
            self._chunks[self._next].sum()
            self._next = (self._next + 1) % len(self._chunks)
            now_ns = time.perf_counter_ns()
        return now_ns - start_ns


def start_echo(num_bytes: int) -> VerifierProcess:
    """Starts the server, which reads `num_bytes` while it is busy."""
    return start_server([sys.executable, "-m", "benchmarks.real.echo", str(num_bytes)])


class EchoClient:
    """Exchanges messages with the server at `address` on one stream."""

    def __init__(self, address: str, num_bytes: int) -> None:
        self._channel = open_channel(address, 10.0)
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._answers = self._channel.stream_stream(METHOD)(iter(self._outbox.get, None))
        self._busy = Busy(num_bytes)

    def beyond_ms(self, exchanges: Iterable[Exchange]) -> list[float]:
        """Returns for each exchange its time beyond the two pauses."""
        return [self._beyond_ns(each) / 1e6 for each in exchanges]

    def _beyond_ns(self, exchange: Exchange) -> int:
        start_ns = time.perf_counter_ns()
        paused_ns = self._busy.pause(exchange.client_ns)
        asked = _ASKED.pack(exchange.server_ns, exchange.bytes_down)
        self._outbox.put(asked.ljust(exchange.bytes_up, b"\0"))
        answer = next(self._answers)
        return time.perf_counter_ns() - start_ns - paused_ns - int(_MADE.unpack_from(answer)[0])

    def close(self) -> None:
        """Ends the stream and the connection."""
        self._outbox.put(None)
        self._channel.close()


async def _serve(num_bytes: int) -> None:
    busy = Busy(num_bytes)

    async def echo(requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            pause_ns, size = _ASKED.unpack_from(request)
            await context.write(_MADE.pack(busy.pause(pause_ns)).ljust(size, b"\0"))

    server = grpc.aio.server(options=server_options(ServeConfig().max_message_bytes))
    service, _, method = METHOD.strip("/").partition("/")
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"serving an echo on 127.0.0.1:{port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
