"""Outrider: distributed speculative decoding. An edge drafts with INT4 weights, a cloud verifies.

`outrider.connect("host:port")` is the Python client, `outrider.SpeculativeDecoder` a draft and a target as one object,
and `outrider.hf` drafts with a model of transformers (docs/library.md). Names are imported when they are first used, so
that `import outrider` takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider import hf as hf
    from outrider import ir
    from outrider.common.errors import (
        ClosedError,
        ConfigError,
        IncompatibleError,
        LinkError,
        ModelError,
        OutriderError,
        RoundFailedError,
        RoundTimeoutError,
        UsageError,
    )
    from outrider.common.types import FinishReason, Method, Origin
    from outrider.decoder.config import DraftStrategy, SpeculativeConfig, TreeStrategy
    from outrider.decoder.decoder import SpeculativeDecoder, SpeculativeDecodingProtocol
    from outrider.decoder.depth import AdaptiveDepthAdjuster
    from outrider.decoder.kv import KVPool, PrefixCache
    from outrider.edge_client.core.events import EndEvent, SessionEvent, TokenEvent
    from outrider.edge_client.library.async_client import AsyncClient, AsyncStream, connect_async
    from outrider.edge_client.library.client import Client, Stream, connect
    from outrider.edge_client.library.result import Result
    from outrider.ir import IRNode

    __version__: str

_MODULES = {
    "common.errors": (
        "ClosedError",
        "ConfigError",
        "IncompatibleError",
        "LinkError",
        "ModelError",
        "OutriderError",
        "RoundFailedError",
        "RoundTimeoutError",
        "UsageError",
    ),
    "common.types": ("FinishReason", "Method", "Origin"),
    "decoder.config": ("DraftStrategy", "SpeculativeConfig", "TreeStrategy"),
    "decoder.decoder": ("SpeculativeDecoder", "SpeculativeDecodingProtocol"),
    "decoder.depth": ("AdaptiveDepthAdjuster",),
    "decoder.kv": ("KVPool", "PrefixCache"),
    "edge_client.core.events": ("EndEvent", "SessionEvent", "TokenEvent"),
    "edge_client.library.async_client": ("AsyncClient", "AsyncStream", "connect_async"),
    "edge_client.library.client": ("Client", "Stream", "connect"),
    "edge_client.library.result": ("Result",),
    "ir": ("IRNode",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AdaptiveDepthAdjuster",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "ClosedError",
    "ConfigError",
    "DraftStrategy",
    "EndEvent",
    "FinishReason",
    "IRNode",
    "IncompatibleError",
    "KVPool",
    "LinkError",
    "Method",
    "ModelError",
    "Origin",
    "OutriderError",
    "PrefixCache",
    "Result",
    "RoundFailedError",
    "RoundTimeoutError",
    "SessionEvent",
    "SpeculativeConfig",
    "SpeculativeDecoder",
    "SpeculativeDecodingProtocol",
    "Stream",
    "TokenEvent",
    "TreeStrategy",
    "UsageError",
    "connect",
    "connect_async",
    "ir",
]


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used. Raises `AttributeError` for any other."""
    if name == "__version__":
        from outrider.common.process.version import own_version

        value: object = own_version()
    elif name in ("hf", "ir"):  # hf is not in __all__: `from outrider import *` imports no torch
        from importlib import import_module

        value = import_module(f"outrider.{name}")
    elif name in _MODULE_OF:
        from importlib import import_module

        value = getattr(import_module(f"outrider.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__", "hf"})
