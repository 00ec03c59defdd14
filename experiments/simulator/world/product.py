"""Puts the product's modules into virtual time, and takes them out again.

What a product module calls `time`, `threading`, `secrets` and so on is looked up by identity and replaced,
default arguments included: nothing of the product is copied or knows of it. Only the network (`GrpcLink`) and
the reading of logits (`make_device_rows`, which is where other devices do theirs) are other code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import queue
import secrets
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import outrider.common.alignment
from outrider.cloud_verifier.verification.device_rows import make_device_rows
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.experiments.simulator.world.standins import (
    SeededSecrets,
    VirtualPool,
    VirtualThreading,
    VirtualTime,
)
from outrider.experiments.simulator.world.world import VirtualQueue, World

PACKAGES = (
    "outrider.common.",
    "outrider.edge_client.",
    "outrider.cloud_verifier.",
    "outrider.experiments.sweep.observing",
)
# Imported by the product when first used: they must be there before they are replaced in.
_LATE_MODULES = (
    "outrider.edge_client.session.factory",
    "outrider.edge_client.controller.depth.optimal",
    "outrider.cloud_verifier.engine.colocated",
    "outrider.cloud_verifier.engine.engine",
    "outrider.cloud_verifier.server.server",
)
_CLOCKS = ("time", "monotonic", "perf_counter", "monotonic_ns", "perf_counter_ns", "sleep")
_MAX_HASHES = 1 << 20

Replacements = dict[int, Any]
"""By the identity of what is replaced."""


@contextlib.contextmanager
def product_in(
    world: World, seed: int, make_link: Callable[..., object], read_rows: Callable[..., object]
) -> Iterator[None]:
    """While inside, product code lives in `world`; one at a time in a process.

    `make_link` takes what `GrpcLink` does, `read_rows` what `make_device_rows` does. Raises RuntimeError where the
    product imported a module meanwhile that still has real clocks.
    """
    for name in _LATE_MODULES:
        importlib.import_module(name)
    replacements = _replacements(world, seed, make_link, read_rows)
    undo: list[Callable[[], None]] = []
    try:
        for module in _product_modules():
            _replace_in(module, replacements, undo)
        known = {module.__name__ for module in _product_modules()}
        yield
        _check_late(known)
    finally:
        for step in reversed(undo):
            step()


def _replacements(
    world: World, seed: int, make_link: Callable[..., object], read_rows: Callable[..., object]
) -> Replacements:
    virtual_time = VirtualTime(world)
    pairs: list[tuple[object, object]] = [
        (time, virtual_time),
        *((getattr(time, name), getattr(virtual_time, name)) for name in _CLOCKS),
        (threading, VirtualThreading(world)),
        (secrets, SeededSecrets(seed)),
        (queue.SimpleQueue, functools.partial(VirtualQueue, world)),
        (ThreadPoolExecutor, functools.partial(VirtualPool, world)),
        (GrpcLink, make_link),
        (make_device_rows, read_rows),
        # Both sides hash every text: the second time it is looked up. Remembering changes no value.
        (
            outrider.common.alignment._next_hash,
            functools.lru_cache(_MAX_HASHES)(outrider.common.alignment._next_hash),
        ),
    ]
    return {id(real): standin for real, standin in pairs}


def _product_modules() -> list[types.ModuleType]:
    return [module for name, module in sorted(sys.modules.items()) if name.startswith(PACKAGES)]


def _replace_in(module: types.ModuleType, replacements: Replacements, undo: list[Callable[[], None]]) -> None:
    for name, value in list(vars(module).items()):
        if id(value) in replacements:
            undo.append(functools.partial(setattr, module, name, value))
            setattr(module, name, replacements[id(value)])
        for function in _functions_of(value, module.__name__):
            _replace_defaults(function, replacements, undo)


def _functions_of(value: object, module_name: str) -> list[types.FunctionType]:
    """A function of the module's own, or the methods of a class of its own."""
    if getattr(value, "__module__", None) != module_name:
        return []
    found = list(vars(value).values()) if isinstance(value, type) else [value]
    return [each for each in found if isinstance(each, types.FunctionType)]


def _replace_defaults(
    function: types.FunctionType, replacements: Replacements, undo: list[Callable[[], None]]
) -> None:
    positional, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
    if any(id(value) in replacements for value in positional):
        undo.append(functools.partial(setattr, function, "__defaults__", positional))
        function.__defaults__ = tuple(replacements.get(id(value), value) for value in positional)
    if any(id(value) in replacements for value in by_name.values()):
        undo.append(functools.partial(setattr, function, "__kwdefaults__", by_name))
        function.__kwdefaults__ = {name: replacements.get(id(v), v) for name, v in by_name.items()}


def _check_late(known: set[str]) -> None:
    late = [
        module.__name__
        for module in _product_modules()
        if module.__name__ not in known
        and any(each is time or each is threading for each in vars(module).values())
    ]
    if late:
        raise RuntimeError(f"in real time until now, add them to _LATE_MODULES: {', '.join(late)}")
