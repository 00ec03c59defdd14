"""What a message costs in gRPC Python before any code of ours: a server that echoes, in many ways.

    python -m outrider.experiments.message_floor [--only raw,protobuf] [--seconds 3] [--turns 3]

A server on one core answers each message with itself; a client on another (`load_wire`, a fifth of a server's
cost) keeps one message of every stream under way. Printed is the server's processor time for one
message in and one out, and how much of it is on threads that gRPC made.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.engine.setup import pinned
from outrider.common.errors import UsageError
from outrider.common.pb import outrider_pb2 as pb
from outrider.experiments.load.wire import WireConnection, connect
from outrider.experiments.shared.command import run_command

PATH = "/floor.Floor/Echo"
SERVER_CORE, CLIENT_CORE = 0, 1
WARMUP_S = 0.5


@dataclass(frozen=True, slots=True)
class Variant:
    """`kind` is one of `HANDLERS`, or `sync`: gRPC's own thread pool."""

    kind: str
    is_protobuf: bool = False
    has_uvloop: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


VARIANTS = {
    "raw": Variant("read_write"),
    "iterate": Variant("iterate"),
    "protobuf": Variant("read_write", is_protobuf=True),
    "two_tasks": Variant("two_tasks"),
    "asyncio_loop": Variant("read_write", has_uvloop=False),
    "throughput": Variant("read_write", options=(("grpc.optimization_target", "throughput"),)),
    "latency": Variant("read_write", options=(("grpc.optimization_target", "latency"),)),
    "no_bdp_probe": Variant("read_write", options=(("grpc.http2.bdp_probe", 0),)),
    "write_buffer": Variant("read_write", options=(("grpc.http2.write_buffer_size", 1 << 20),)),
    "minimal_stack": Variant("read_write", options=(("grpc.minimal_stack", 1),)),
    "poll": Variant("read_write", environment=(("GRPC_POLL_STRATEGY", "poll"),)),
    "sync": Variant("sync"),
}


# ------------------------------------------------------------------------------------------- servers


async def read_write(requests: Any, context: Any) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)


async def iterate(requests: Any, context: Any) -> Any:
    async for message in requests:
        yield message


async def two_tasks(requests: Any, context: Any) -> None:
    """A task that reads, and one that writes what a queue holds: a verifier's answers come when they come."""
    queue: asyncio.Queue[Any] = asyncio.Queue()

    async def read() -> None:
        async for message in requests:
            queue.put_nowait(message)
        queue.put_nowait(None)

    reader = asyncio.create_task(read())
    while (message := await queue.get()) is not None:
        await context.write(message)
    await reader


HANDLERS: dict[str, Callable[[Any, Any], Any]] = {
    "read_write": read_write,
    "iterate": iterate,
    "two_tasks": two_tasks,
}


def _add_handler(server: Any, variant: Variant, echo: Callable[[Any, Any], Any]) -> int:
    codec = (pb.SessionRequest.FromString, pb.SessionRequest.SerializeToString)
    handler = grpc.stream_stream_rpc_method_handler(echo, *(codec if variant.is_protobuf else ()))
    service, method = PATH.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    return int(server.add_insecure_port("127.0.0.1:0"))


async def _serve_aio(variant: Variant) -> None:
    server = grpc.aio.server(options=variant.options)
    port = _add_handler(server, variant, HANDLERS[variant.kind])
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def serve(variant: Variant) -> None:
    if variant.kind == "sync":
        server = grpc.server(ThreadPoolExecutor(256), options=variant.options)
        port = _add_handler(server, variant, lambda requests, context: requests)
        server.start()
        print(port, flush=True)
        server.wait_for_termination()
    elif variant.has_uvloop:
        import uvloop

        uvloop.run(_serve_aio(variant))
    else:
        asyncio.run(_serve_aio(variant))


# -------------------------------------------------------------------------------------------- client


@dataclass(frozen=True, slots=True)
class Cost:
    messages_per_s: float
    us: float  # processor time of the server, a message in and one out
    grpc_us: float  # of that, on threads other than the main one


def cpu_ns(pid: int) -> tuple[int, int]:
    """Processor time of a process so far: of its main thread, of the others."""
    times = {int(p.name): int((p / "schedstat").read_text().split()[0]) for p in _threads(pid)}
    main_ns = times.pop(pid)
    return main_ns, sum(times.values())


def _threads(pid: int) -> Sequence[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


async def measure_cost(
    address: str, pid: int, num_streams: int, num_connections: int, seconds: float
) -> Cost:
    """Every stream has one message under way."""
    connections = [await connect(address) for _ in range(num_connections)]
    request = pb.VerifyRequest(
        round_id=7,
        base_position=100,
        base_hash=1 << 60,
        draft_tokens=[1000, 2000, 3000, 4000],
        q_token_probs=[0.5, 0.25, 0.75, 1.0],
        deadline_ms=400,
    )
    message = pb.SessionRequest(verify=request).SerializeToString()
    count, is_over = 0, False

    async def play(connection: WireConnection) -> None:
        nonlocal count
        stream = connection.open_stream(PATH, ())
        while not is_over:
            stream.write(message)
            await stream.read()
            count += 1
        stream.cancel()

    playing = [asyncio.create_task(play(connections[i % num_connections])) for i in range(num_streams)]
    await asyncio.sleep(WARMUP_S)
    begin, begin_count, begin_s = cpu_ns(pid), count, time.perf_counter()
    await asyncio.sleep(seconds)
    end, num_messages, wall_s = cpu_ns(pid), count - begin_count, time.perf_counter() - begin_s
    is_over = True
    await asyncio.gather(*playing)
    for connection in connections:
        connection.close()
    main_us, grpc_us = ((now - before) / 1e3 / num_messages for now, before in zip(end, begin, strict=True))
    return Cost(num_messages / wall_s, main_us + grpc_us, grpc_us)


def measure(name: str, num_streams: int, num_connections: int, seconds: float) -> Cost:
    command = [sys.executable, "-m", "outrider.experiments.message_floor", "--serve", name]
    environment = {**os.environ, **dict(VARIANTS[name].environment)}
    with pinned(SERVER_CORE):
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    with server:
        try:
            assert server.stdout is not None
            address = f"127.0.0.1:{int(server.stdout.readline())}"
            with pinned(CLIENT_CORE):
                return asyncio.run(measure_cost(address, server.pid, num_streams, num_connections, seconds))
        finally:
            server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m outrider.experiments.message_floor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default=",".join(VARIANTS), metavar="NAME,NAME", help=", ".join(VARIANTS))
    parser.add_argument("--streams", type=int, default=32, metavar="N")
    parser.add_argument("--connections", default="1,32", metavar="N,N", help="TCP connections for them")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="the median of so many")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(VARIANTS[arguments.serve])
        return 0
    names = arguments.only.split(",")
    if unknown := set(names) - set(VARIANTS):
        raise UsageError(f"--only {', '.join(sorted(unknown))}: want some of {', '.join(VARIANTS)}")
    counts = [int(n) for n in arguments.connections.split(",")]
    found: dict[tuple[str, int], list[Cost]] = {(name, n): [] for n in counts for name in names}
    for _ in range(arguments.turns):
        for (name, n), costs in found.items():
            costs.append(measure(name, arguments.streams, n, arguments.seconds))
    for (name, n), costs in found.items():
        us, grpc_us = statistics.median(c.us for c in costs), statistics.median(c.grpc_us for c in costs)
        rate = statistics.median(c.messages_per_s for c in costs)
        print(f"{name:14} {n:3} connections: {us:6.1f} us, {grpc_us:5.1f} on gRPC's threads; {rate:6.0f}/s")
    return 0


if __name__ == "__main__":
    run_command("message_floor", main)
