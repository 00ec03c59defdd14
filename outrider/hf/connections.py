"""Keeps the connections of a model between calls: what the verifier said of its target, the draft, and KV of texts.

No channel is open between calls. A model's connections are kept as long as the model, at most `_MAX_KEPT` of them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers.utils import cached_file

from outrider.common.errors import UsageError
from outrider.edge_client.drafting.backend import TORCH
from outrider.edge_client.drafting.pytorch.in_process import draft_with
from outrider.edge_client.drafting.registry import MODEL
from outrider.edge_client.drafting.spec import TOKENIZER_FILE
from outrider.edge_client.library.connection import Connection
from outrider.edge_client.library.settings import client_config

_MAX_KEPT = 4  # verifiers, with their settings, that programs change between


class _OfModel:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connections: OrderedDict[tuple[object, ...], Connection] = OrderedDict()


_of_models: WeakKeyDictionary[Any, _OfModel] = WeakKeyDictionary()
_lock = threading.Lock()


def connection_of(
    model: Any, verifier: str, tokenizer_dir: str | Path | None, settings: Mapping[str, object]
) -> Connection:
    """Returns the connection of a model to a verifier, made by the first call. Thread-safe. Raises what
    `outrider.connect` raises, and `UsageError` where the model's tokenizer is not found."""
    directory = _tokenizer_dir(model, tokenizer_dir)
    place = (str(model.device), str(model.dtype))  # a model that has moved is another draft
    key = (verifier, directory, place, repr(sorted(settings.items())))
    with _lock:
        kept = _of_models.setdefault(model, _OfModel())
    with kept.lock:
        connection = kept.connections.pop(key, None) or _connect(model, verifier, directory, settings)
        kept.connections[key] = connection
        while len(kept.connections) > _MAX_KEPT:
            kept.connections.popitem(last=False)
    return connection


def _connect(model: Any, verifier: str, directory: Path, settings: Mapping[str, object]) -> Connection:
    ours = {"draft_strategy": MODEL, "draft_backend": TORCH}
    config, _ = client_config(verifier, directory, {**settings, **ours})
    return Connection(config, True, lambda *_: draft_with(model, directory / TOKENIZER_FILE))


def _tokenizer_dir(model: Any, given: str | Path | None) -> Path:
    """Returns the directory with the model's tokenizer.json: the given one, else the one that it was loaded from, or
    where the hub's files are cached."""
    name = str(given or model.name_or_path)
    if name and (Path(name) / TOKENIZER_FILE).is_file():
        return Path(name)
    found = None
    if name and not Path(name).is_dir():
        try:
            found = cached_file(name, TOKENIZER_FILE, local_files_only=True)
        except (OSError, ValueError):  # it is not in the cache, or no name of a model
            found = None
    if found is None:
        raise UsageError(
            f"tokenizer_dir: no {TOKENIZER_FILE} {f'in {name}' if name else 'of this model is known'}",
            "name the directory that has the model's",
        )
    return Path(found).parent
