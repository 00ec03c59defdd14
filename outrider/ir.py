"""A scheduler's node for speculative decoding, and what runs it: `outrider.ir.execute(node, prompt_tokens)`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.common.config.loader import did_you_mean
from outrider.common.errors import UsageError
from outrider.decoder.config import SpeculativeConfig
from outrider.decoder.decoder import SpeculativeDecoder
from outrider.decoder.fields import setup_values

DECODE_SPECULATIVE = "decode_speculative"
SPECULATIVE = "speculative"
KEYS = ("draft_model", "num_tokens", "adaptive")
MAX_DECODERS = 2  # kept for nodes to come; models are large


@dataclass(frozen=True, slots=True)
class IRNode:
    """Describes one operation of a schedule.

    Of type "decode_speculative", with {"speculative": {"draft_model": directory or None, "num_tokens": int, "adaptive":
    bool}}; each of the three may be left out and is then that of `execute`'s configuration.
    """

    type: str
    config: Mapping[str, object] = field(default_factory=dict)


_kept: OrderedDict[tuple[str, str], SpeculativeDecoder] = OrderedDict()  # least recently used first
_lock = threading.Lock()


def execute(
    node: IRNode,
    prompt_tokens: Sequence[int],
    max_new_tokens: int = 256,
    *,
    verify_model_path: str | Path | None = None,
    decoder: SpeculativeDecoder | None = None,
    config: SpeculativeConfig | None = None,
    seed: int | None = None,
) -> tuple[list[int], dict[str, float]]:
    """Returns what `SpeculativeDecoder.decode_step` returns for a node, one node at a time.

    Either `verify_model_path` names the target (a decoder is then kept for further nodes with the same target and
    draft, until `close`), or a `decoder` that is set up is given. `config` has the fields that a node does not say; by
    default they are those that `decoder` was set up with, else `SpeculativeConfig`'s.
    Raises `UsageError` for a node of another type or with other keys, and what `setup` and `decode_step` raise.
    """
    wanted = node_config(node, config or (decoder.config if decoder is not None else None))
    if (verify_model_path is None) is (decoder is None):
        raise UsageError("execute wants a target", "give verify_model_path or decoder, one of them")
    with _lock:
        if decoder is None:
            decoder = _find_decoder(str(verify_model_path), wanted)
        return decoder.decode_step(prompt_tokens, max_new_tokens, wanted, seed=seed)


def node_config(node: IRNode, base: SpeculativeConfig | None = None) -> SpeculativeConfig:
    """Returns the configuration that a node asks for. Raises `UsageError`."""
    if node.type != DECODE_SPECULATIVE:
        raise UsageError(f"IRNode of type {node.type!r}", f"only {DECODE_SPECULATIVE!r} is run here")
    _check_keys(node.config, (SPECULATIVE,), "config")
    asked = node.config.get(SPECULATIVE, {})
    if not isinstance(asked, Mapping):
        raise UsageError(f"config[{SPECULATIVE!r}] is {asked!r}", f"want a mapping of {', '.join(KEYS)}")
    _check_keys(asked, KEYS, f"config[{SPECULATIVE!r}]")
    config = base or SpeculativeConfig()
    number = asked.get("num_tokens", config.num_speculative_tokens)
    if type(number) is not int or number < 1:
        raise UsageError(f"num_tokens is {number!r}", "want a number from 1")
    return replace(
        config,
        draft_model_path=asked.get("draft_model", config.draft_model_path),
        num_speculative_tokens=number,
        min_speculative_tokens=min(number, config.min_speculative_tokens),
        max_speculative_tokens=max(number, config.max_speculative_tokens),
        adaptive_depth=asked.get("adaptive", config.adaptive_depth),
    )


def close() -> None:
    """Closes the decoders that are kept."""
    with _lock:
        while _kept:
            _kept.popitem()[1].close()


def _find_decoder(target: str, config: SpeculativeConfig) -> SpeculativeDecoder:
    key = (target, repr(setup_values(config)))
    decoder = _kept.pop(key, None)
    if decoder is None:
        while len(_kept) >= MAX_DECODERS:
            _kept.popitem(last=False)[1].close()
        decoder = SpeculativeDecoder()
        decoder.setup(target, config)
    _kept[key] = decoder
    return decoder


def _check_keys(found: Mapping[str, object], known: Sequence[str], where: str) -> None:
    if unknown := next((each for each in found if each not in known), None):
        raise UsageError(f"{where} has no key {unknown!r}{did_you_mean(str(unknown), known)}")
