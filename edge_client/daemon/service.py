"""What the daemon holds, whoever asks: the edge, its pool, the requests under way, and the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from outrider.common.config.addresses import is_loopback, split_address
from outrider.common.config.loader import Loaded
from outrider.common.errors import UsageError
from outrider.common.types import Method, SamplingParams
from outrider.edge_client.config.run_config import RunConfig, default_draft_dir
from outrider.edge_client.config.serve import SECTION, ServeConfig
from outrider.edge_client.core.options import Mode
from outrider.edge_client.daemon.activity import Activity
from outrider.edge_client.daemon.admission import Admission
from outrider.edge_client.daemon.http.keys import Keys
from outrider.edge_client.daemon.metrics import DaemonMetrics
from outrider.edge_client.daemon.openai.errors import ApiError
from outrider.edge_client.daemon.openai.parsed import Kind, ParsedRequest
from outrider.edge_client.daemon.openai.request_config import config_of
from outrider.edge_client.daemon.verifier_watch import VerifierWatch
from outrider.edge_client.drafting.pool import DraftLease, SequencePool
from outrider.edge_client.drafting.registry import WITHOUT_MODEL
from outrider.edge_client.drafting.spec import SPEC_FILE
from outrider.edge_client.session.factory import Edge, create_edge, create_link, draw_seed
from outrider.edge_client.session.session import EdgeSession, new_session_id
from outrider.edge_client.tokenization.chat_template import ChatTemplate, load_chat_template

log = logging.getLogger(__name__)

# What a running process cannot take up; everything else a SIGHUP reloads.
NEEDS_RESTART = (
    "draft",
    "draft_strategy",
    "lookup_ngram",
    "draft_threads",
    "min_draft_ms",
    "otlp_endpoint",
    "serve.listen",
    "serve.insecure",
    "serve.draft_cache_mb",
    "serve.log_json",
)
_NO_TEMPLATE = (
    "this model has no chat template: neither chat_template.jinja nor tokenizer_config.json in {} has one. "
    "Start the daemon with --chat-template FILE, or use /v1/completions"
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A session ready to start, and what its answer tells about it."""

    session: EdgeSession
    config: RunConfig
    seed: int
    num_prompt_tokens: int
    lease: DraftLease | None

    @property
    def num_reused_tokens(self) -> int:
        return self.lease.num_reused_tokens if self.lease else 0


class Daemon:
    """`load` reads the configuration again. Raises as `create_edge` and `load_chat_template`."""

    def __init__(self, load: Callable[[], Loaded[RunConfig]]) -> None:
        self._load = load
        self.config = load().value
        self.directory = Path(self.config.draft) if self.config.draft else default_draft_dir()
        self.keys = Keys.read(self.config.serve)
        _check(self.config, self.keys)
        self.template: ChatTemplate | None = self._load_template(self.config)
        self.edge: Edge = create_edge(self.config, has_draft=_has_draft(self.config, self.directory))
        self._pool: SequencePool | None = None
        if self.edge.draft is not None:
            self._pool = SequencePool(self.edge.draft, int(self.serve.draft_cache_mb * 2**20))
        self.admission = Admission(self.serve.max_requests, self.serve.max_queue)
        self.activity = Activity()
        self.watch = VerifierWatch()
        self.metrics = DaemonMetrics(self)
        self._warm_up()

    @property
    def serve(self) -> ServeConfig:
        return self.config.serve

    @property
    def num_idle_sequences(self) -> int:
        return self._pool.num_idle if self._pool else 0

    @property
    def num_idle_bytes(self) -> int:
        return self._pool.num_idle_bytes if self._pool else 0

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 for a model that is not served; None asks for the one there is."""
        state = self.watch.state
        target = state.model.model_id if state and state.model else None
        if name not in (None, self.serve.model_name, target):
            message = f"the model {name!r} does not exist; {self.serve.model_name!r} does"
            raise ApiError(404, message, param="model", code="model_not_found")

    def prepare(self, parsed: ParsedRequest) -> Prepared:
        """Reads the prompt; may take a moment for a long one. Raises `OutriderError`, `ApiError`."""
        config = config_of(self.config, parsed)
        seed = draw_seed() if config.seed is None else config.seed
        prompt_ids = self._encode(parsed)
        lease = self._lease(config)
        session = self.edge.session(prompt_ids, seed, config, lease)
        return Prepared(session, config, seed, len(prompt_ids), lease)

    def _encode(self, parsed: ParsedRequest) -> list[int]:
        tokenizer = self.edge.tokenizer
        if parsed.kind is Kind.COMPLETION:
            return tokenizer.encode(parsed.prompt) if isinstance(parsed.prompt, str) else list(parsed.prompt)
        if self.template is None:
            message = _NO_TEMPLATE.format(self.directory)
            raise ApiError(400, message, param="messages", code="no_chat_template")
        return tokenizer.encode(self.template.render(parsed.messages), is_complete=True)

    def _lease(self, config: RunConfig) -> DraftLease | None:
        """Only where the target decides alone may the draft's memory come from another text (pool.py)."""
        is_drafted = Mode(config.mode).has_draft and config.mode != Mode.EDGE_ONLY
        if self._pool is None or not is_drafted or config.method != Method.COUPLED:
            return None
        return self._pool.lease()

    # -------------------------------------------------------------------------------------- changes

    def reload(self) -> list[str]:
        """Takes up the configuration as it is now; returns the keys that wait for a restart. Raises
        `OutriderError` and changes nothing where it is wrong."""
        config, held_back = _keep(self.config, self._load().value, NEEDS_RESTART)
        keys, template = Keys.read(config.serve), self._load_template(config)
        _check(config, keys)
        self.config, self.keys, self.template = config, keys, template
        self.edge.config = config
        self.admission.set_bounds(config.serve.max_requests, config.serve.max_queue)
        self.watch.forget()
        return held_back

    def _warm_up(self) -> None:
        """So that the first request does not pay for imports and first runs."""
        if self.edge.draft is not None:
            sequence = self.edge.draft.sequence(SamplingParams())
            sequence.commit([0])
            sequence.propose(2)
            sequence.close()
        self.prepare(ParsedRequest(Kind.COMPLETION, prompt=(0,)))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self.edge.close()

    def check_integrity(self) -> None:
        self.admission.check_integrity()
        if self._pool is not None:
            self._pool.check_integrity()

    def _load_template(self, config: RunConfig) -> ChatTemplate | None:
        return load_chat_template(self.directory, config.serve.chat_template)


def _check(config: RunConfig, keys: Keys) -> None:
    """Raises `UsageError` for addresses that are none, and for a port that others reach and nobody guards."""
    create_link(config, new_session_id())
    listen = config.serve.listen
    host, _ = split_address(listen, "--listen", "127.0.0.1:7079")
    if not is_loopback(host) and not keys and not config.serve.insecure:
        raise UsageError(
            f"--listen {listen}: others reach this address, and no API key guards it; "
            "add --api-key-file FILE, or --insecure if the network is yours and trusted"
        )


def _has_draft(config: RunConfig, directory: Path) -> bool:
    """A request may choose a mode that drafts, so the draft is loaded where there is one."""
    is_there = config.draft_strategy in WITHOUT_MODEL or (directory / SPEC_FILE).is_file()
    return Mode(config.mode).has_draft or is_there


def _keep(old: RunConfig, new: RunConfig, keys: tuple[str, ...]) -> tuple[RunConfig, list[str]]:
    """`new` with what `old` has under `keys`; and which of those differed."""
    differing = []
    serve_changes: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        mine, theirs = (old.serve, new.serve) if section == SECTION else (old, new)
        assert name in {field.name for field in fields(mine)}, f"no field {key}"
        if getattr(mine, name) != getattr(theirs, name):
            differing.append(key)
            (serve_changes if section else changes)[name] = getattr(mine, name)
    return replace(new, serve=replace(new.serve, **serve_changes), **changes), differing
