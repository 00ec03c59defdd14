"""`SpeculativeDecoder`: a draft and a target as one object, the target in this process or behind a verifier."""

from __future__ import annotations

import logging
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Self

from outrider.common.errors import ClosedError, ConfigError, IncompatibleError, UsageError
from outrider.common.process.extras import needs_extra
from outrider.common.types import DRAFT_SOURCE, FinishReason, ModelInfo
from outrider.decoder.config import SpeculativeConfig, TreeStrategy
from outrider.decoder.depth import AdaptiveDepthAdjuster, AdjustedDepth
from outrider.decoder.fields import FIELDS, judge_fields, setup_values
from outrider.decoder.kv import KVPool, PrefixCache
from outrider.decoder.parts import call_settings, make_client_config, make_draft, make_serve_config
from outrider.decoder.places import GRPC, find_device, find_target
from outrider.decoder.sources import Site, Source
from outrider.decoder.stats import Counts, draft_latency_s, verify_latency_s
from outrider.edge_client.library.connection import CONNECT_TIMEOUT_S, Connection
from outrider.edge_client.library.settings import client_config
from outrider.edge_client.session.factory import Surroundings, create_link, draw_seed
from outrider.edge_client.session.session import EdgeSession, new_session_id
from outrider.edge_client.session.shared_edge import Prepared

if TYPE_CHECKING:
    from outrider.decoder.in_process import InProcessVerifier

log = logging.getLogger(__name__)

NUM_TURNS = 3  # of a baseline: both ways of decoding, one after the other
Tokens = list[int]


class SpeculativeDecodingProtocol(ABC):
    """Is what decodes speculatively: the interface that systems of the field call."""

    @abstractmethod
    def setup(self, verify_model_path: str | Path, config: SpeculativeConfig | None = None) -> None:
        """Loads or connects to the target, and loads the draft."""

    @abstractmethod
    def decode_step(
        self, prompt_tokens: Sequence[int], max_new_tokens: int, config: SpeculativeConfig | None = None
    ) -> tuple[Tokens, dict[str, float]]:
        """Returns the new tokens after a prompt, and how they were made."""

    @abstractmethod
    def get_acceptance_rate(self) -> float:
        """Returns the share of drafted tokens that were accepted so far."""

    @abstractmethod
    def adjust_speculative_depth(self, acceptance_rate: float) -> int:
        """Returns the draft length after a round with this acceptance rate."""

    @abstractmethod
    def report(self) -> dict[str, object]:
        """Returns what was set up and measured."""


@dataclass(slots=True)
class _Running:
    """Holds what `setup` made."""

    config: SpeculativeConfig
    source: Source
    site: Site
    no_effect: dict[str, str]
    connection: Connection
    verifier: InProcessVerifier | None
    address: str
    folder: Path  # of what was made for this decoder
    resources: ExitStack


@dataclass(frozen=True, slots=True)
class _Call:
    """Holds the arguments of one `decode_step`."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    config: SpeculativeConfig
    seed: int


class _InCaller:
    """Runs a session to its end in the thread that makes it (see `Connection.start`)."""

    def __init__(self, session: EdgeSession, is_reverified: bool, on_end: Callable[[], None]) -> None:
        try:
            for _ in session.generate():
                pass
        finally:
            on_end()


class SpeculativeDecoder(SpeculativeDecodingProtocol):
    """Decodes with a draft and a target. `with SpeculativeDecoder() as decoder: decoder.setup(...)`.

    The text is what the target alone writes with the same seed. For one thread at a time.
    """

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._counts = Counts()
        self._adjuster = AdaptiveDepthAdjuster()
        self._adjusted_for: tuple[object, ...] = ()
        self._last: _Call | None = None
        self._baseline_token_s = math.nan  # of the target alone

    @property
    def config(self) -> SpeculativeConfig | None:
        """Returns a copy of the configuration that `setup` was given; None before it and after `close`."""
        return None if self._running is None else replace(self._running.config)

    def setup(
        self,
        verify_model_path: str | Path,
        config: SpeculativeConfig | None = None,
        *,
        device: str | None = None,
    ) -> None:
        """Loads the target of a directory, or of a hub id that is cached, in this process, or connects to the verifier
        at `grpc://HOST:PORT`; then loads the draft. What was set up before is closed.

        `device` is where a target runs that is loaded here: cpu, cuda or cuda:N; None is CUDA where torch finds it.
        Raises `ConfigError` naming a field that is refused, `ModelError` and `IncompatibleError` for models,
        `LinkError` where no verifier answers.
        """
        self.close()
        config = replace(config) if config is not None else SpeculativeConfig()
        with ExitStack() as stack:
            self._running = _set_up(str(verify_model_path), config, device, stack)
        self._counts, self._last, self._baseline_token_s = Counts(), None, math.nan
        self._adjust_for(config)

    def decode_step(
        self,
        prompt_tokens: Sequence[int],
        max_new_tokens: int,
        config: SpeculativeConfig | None = None,
        *,
        seed: int | None = None,
    ) -> tuple[Tokens, dict[str, float]]:
        """Returns the tokens that follow a prompt, at most `max_new_tokens`, up to the end of text, and `stats`.

        `config` may differ from that of `setup` in all but what is loaded there. A `seed` of None draws one. `stats`:
        `acceptance_rate` of drafted tokens; `speedup` against the target alone, NaN until `report(baseline=True)` has
        measured that; `draft_latency` and `verify_latency`, mean seconds of a round. Raises `UsageError` for arguments,
        `ClosedError` before `setup` and after `close`, and the `OutriderError` that ended the generation.
        """
        running = self._open()
        if config is not None:
            _check_call(config, running)
        wanted = replace(config if config is not None else running.config)
        self._adjust_for(wanted)
        call = _Call(tuple(prompt_tokens), max_new_tokens, wanted, draw_seed() if seed is None else seed)
        prepared, seconds = self._decode(call)
        tokens, stats = list(prepared.session.result.token_ids), prepared.session.result.stats
        self._last = call
        self._counts.add(stats, len(tokens))
        own = Counts()
        own.add(stats, len(tokens))
        told = {
            "acceptance_rate": own.acceptance_rate,
            "speedup": self._baseline_token_s * len(tokens) / seconds,
            "draft_latency": draft_latency_s(stats.rounds),
            "verify_latency": verify_latency_s(stats.rounds),
        }
        if wanted.log_acceptance_rate:
            log.info(
                "accepted %d of %d drafted tokens: %.3f",
                own.num_accepted,
                own.num_drafted,
                own.acceptance_rate,
            )
        if wanted.log_speedup and not math.isnan(told["speedup"]):
            log.info("%.2f times as fast as the target alone", told["speedup"])
        return tokens, told

    def get_acceptance_rate(self) -> float:
        """Returns accepted / drafted tokens since `setup`; NaN where nothing was drafted."""
        return self._counts.acceptance_rate

    def adjust_speculative_depth(self, acceptance_rate: float) -> int:
        """Adds an acceptance rate, 0 to 1, to the last ten that the draft length follows; returns the length of the
        next draft. Raises `ConfigError` for another number, and where trees are drafted."""
        if self._open().config.tree_strategy == TreeStrategy.TREE:
            raise ConfigError("tree_strategy=tree", "tree_width and tree_depth are the size of a draft")
        return self._adjuster.update(acceptance_rate)

    def report(self, baseline: bool = False) -> dict[str, object]:
        """Returns what was set up and measured; `no_effect` has the fields without effect, with the reasons.

        With `baseline` the last prompt is decoded again, speculatively and by the target alone in turn, for `speedup`;
        `UsageError` where there was none.
        """
        running = self._open()
        speedup = self._measure_baseline() if baseline else math.nan
        model = self.model
        return {
            "target": model.model_id,
            "where": running.address,
            "device": model.device,
            "dtype": model.dtype,
            "draft_strategy": str(running.config.draft_strategy),
            "drafts_at": "verifier" if running.source.colocated else "client",
            "num_speculative_tokens": self._adjuster.depth,
            "num_steps": self._counts.num_steps,
            "num_tokens": self._counts.num_tokens,
            "num_rounds": self._counts.num_rounds,
            "num_draft_tokens": self._counts.num_drafted,
            "num_accepted_tokens": self._counts.num_accepted,
            "acceptance_rate": self._counts.acceptance_rate,
            "speedup": speedup,
            "honoured": [name for name in FIELDS if name not in running.no_effect],
            "no_effect": dict(running.no_effect),
        }

    @property
    def model(self) -> ModelInfo:
        """Returns the verifier's description of its target."""
        model = self._open().connection.model
        assert model is not None, "a decoder asks its verifier"
        return model

    @property
    def kv_pool(self) -> KVPool:
        """Returns the KV pool of a target in this process. Raises `UsageError` for a remote one."""
        verifier = self._open().verifier
        if verifier is None:
            raise UsageError("kv_pool: the KV of a remote target is not here", "set up a directory")
        blocks = verifier.backend.blocks
        return KVPool(blocks.num_blocks, block_size=blocks.block_size, manager=blocks)

    @property
    def prefix_cache(self) -> PrefixCache:
        """Returns the prefix cache of a target in this process. Raises `UsageError` for a remote one."""
        return PrefixCache(self.kv_pool)

    def close(self) -> None:
        """Frees target and draft, or disconnects; a second call does no harm."""
        running, self._running = self._running, None
        if running is not None:
            running.resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> _Running:
        if self._running is None:
            raise ClosedError("this decoder has no target", "call setup first")
        return self._running

    def _adjust_for(self, config: SpeculativeConfig) -> None:
        """Begins with the draft length of a configuration that has another one than the last."""
        low, high, number = (
            config.min_speculative_tokens,
            config.max_speculative_tokens,
            config.num_speculative_tokens,
        )
        wanted = (config.target_acceptance_rate, low, high, number, config.adaptive_depth)
        if wanted == self._adjusted_for:
            return
        if not config.adaptive_depth:  # by hand alone, from any length
            low, high = min(low, number), max(high, number)
        self._adjuster = AdaptiveDepthAdjuster(config.target_acceptance_rate, low, high, depth=number)
        self._adjusted_for = wanted

    def _decode(self, call: _Call, is_alone: bool = False, owner: str = "") -> tuple[Prepared, float]:
        """Returns the session of a generation that has ended, and its seconds. `is_alone`: by the target alone;
        `owner`: whose earlier texts a draft of copies has."""
        connection, config = self._open().connection, call.config
        settings = call_settings(config, self._adjuster.depth)
        depth = None
        if is_alone:
            settings = {"temperature": config.temperature, "top_p": config.top_p}
            settings |= {"mode": "cloud-only", "draft_source": DRAFT_SOURCE}
        elif config.adaptive_depth and config.tree_strategy != TreeStrategy.TREE:
            depth = AdjustedDepth(self._adjuster)
        settings |= {"max_new_tokens": call.max_new_tokens, "seed": call.seed}
        start_s = time.perf_counter()
        prepared = connection.prepare(call.prompt, settings, depth, owner)
        connection.start(prepared, _InCaller)
        seconds = time.perf_counter() - start_s
        if prepared.session.result.finish_reason is FinishReason.CANCELLED:
            raise ClosedError("this decoder was closed while it decoded")
        return prepared, seconds

    def _measure_baseline(self) -> float:
        if self._last is None:
            raise UsageError("report(baseline=True) decodes the last prompt again", "call decode_step first")
        took: dict[bool, list[float]] = {True: [], False: []}
        num_tokens = 0
        for _ in range(NUM_TURNS):
            owner = secrets.token_hex(8)  # a draft of copies must not have the text already
            for is_alone, times in took.items():
                prepared, seconds = self._decode(self._last, is_alone, owner)
                num_tokens = len(prepared.session.result.token_ids)
                times.append(seconds)
        self._baseline_token_s = median(took[True]) / max(1, num_tokens)
        return median(took[True]) / median(took[False])


def _set_up(path: str, config: SpeculativeConfig, device: str | None, stack: ExitStack) -> _Running:
    """Returns what is set up; `stack` closes it where something fails half-way."""
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="outrider-")))
    site = _find_site(path, device)
    source, no_effect = judge_fields(config, site)
    verifier: InProcessVerifier | None = None
    surroundings, address = Surroundings(), path.removeprefix(GRPC)
    if site.is_local:
        with needs_extra("cloud", "a target in this process"):
            from outrider.decoder.in_process import ADDRESS, InProcessVerifier

        verifier = InProcessVerifier(make_serve_config(config, source, site, folder))
        stack.callback(verifier.close)
        surroundings = Surroundings(create_link=verifier.create_link, is_local=lambda config: True)
        address = ADDRESS
    draft = make_draft(config, source, site, folder / "draft")
    client = make_client_config(config, source, site, draft, address)
    connection = Connection(client, None, surroundings=surroundings)
    stack.callback(connection.close, cancel=True)
    assert connection.model is not None, "a decoder asks its verifier"
    if connection.tokenizer.fingerprint != connection.model.tokenizer_fingerprint:
        found = f"the tokenizer of {draft.directory} is not the target's"
        raise IncompatibleError(found, "name a draft of the target's family with draft_model_path")
    return _Running(config, source, site, no_effect, connection, verifier, address, folder, stack.pop_all())


def _find_site(path: str, device: str | None) -> Site:
    if not path.startswith(GRPC):
        target = find_target(path)
        with needs_extra("cloud", "a target in this process"):
            return Site(target, device or find_device())
    if device is not None:
        raise ConfigError(f"device is {device!r}", "a remote verifier has its own: --device")
    address = path.removeprefix(GRPC)
    config, _ = client_config(address, None, {})
    model = create_link(config, new_session_id()).describe(CONNECT_TIMEOUT_S)
    return Site(None, model.device, model.draft_sources, model.kv_dtype)


def _check_call(config: SpeculativeConfig, running: _Running) -> None:
    """Raises `ConfigError` for a configuration that is refused, or needs another `setup`."""
    judge_fields(config, running.site)
    loaded = setup_values(running.config)
    for name, asked in setup_values(config).items():
        if asked != loaded[name]:
            raise ConfigError(
                f"{name} is {asked!r} and was {loaded[name]!r} in setup",
                "call setup with the new configuration",
            )
