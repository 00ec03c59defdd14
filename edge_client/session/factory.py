"""Makes sessions from a configuration: checks parameters, creates parts, imports heavy packages."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.errors import IncompatibleError, InvalidFieldError, UsageError
from outrider.common.sampling.processors import check_sampling_params, on_wire
from outrider.common.stopping import check_stop_params
from outrider.common.types import UNLIMITED_TOKENS, SamplingParams, StopParams, TokenIds
from outrider.edge_client.config.gate import create_gate, gate_settings
from outrider.edge_client.config.grammar import make_grammar
from outrider.edge_client.config.methods import check_method, draft_source, make_method_params, support_size
from outrider.edge_client.config.preset_section import BIG_LITTLE
from outrider.edge_client.config.run_config import RunConfig, draft_dir
from outrider.edge_client.config.tree import tree_budget, tree_use
from outrider.edge_client.controller.acceptance_prior import AcceptancePrior
from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.controller.depth.registry import create_depth_policy
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.controller.window import RoundWindow, create_window
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, Pipelining, SessionOptions
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.learned.learner import Learner
from outrider.edge_client.drafting.onnx.runner import DropoutCost
from outrider.edge_client.drafting.registry import WITHOUT_MODEL, create_draft_model
from outrider.edge_client.drafting.union import UnionModel
from outrider.edge_client.session.grammars import EdgeGrammars
from outrider.edge_client.session.session import EdgeSession, new_session_id
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.link.base import VerifierLink
from outrider.edge_client.transport.link.targets import parse_target
from outrider.edge_client.transport.remote_verifier import RemoteVerifier
from outrider.edge_client.transport.threads import SYSTEM_THREADS, Threads

if TYPE_CHECKING:
    from outrider.edge_client.transport.link.grpc_link import GrpcLink


def create_link(config: RunConfig, session_id: bytes) -> GrpcLink:
    """Returns the link to the verifier, not yet connected. Raises `UsageError` for a malformed address, and
    for TLS or token flags that cannot be used."""
    from outrider.edge_client.transport.link.grpc_link import GrpcLink
    from outrider.edge_client.transport.link.security import link_security

    security = link_security(config.connection, config.verifier)
    return GrpcLink(config.verifier, session_id, config.connection.transport, security)


def is_local(config: RunConfig) -> bool:
    """Returns whether the verifier is reached by this machine's own address, and so shares its processors."""
    return parse_target(config.verifier).is_loopback


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Holds what sessions take from outside the product: time, threads, the network and random ids.

    The defaults are the machine's own; the simulator passes virtual ones.
    """

    clock: Clock = SYSTEM_CLOCK
    threads: Threads = SYSTEM_THREADS
    create_link: Callable[[RunConfig, bytes], VerifierLink] = create_link
    new_session_id: Callable[[], bytes] = new_session_id
    is_local: Callable[[RunConfig], bool] = is_local


@dataclass(slots=True)
class Edge:
    """Holds what outlives one session: the tokenizer, the draft's weights, and the acceptance prior."""

    config: RunConfig
    tokenizer: EdgeTokenizer
    draft: DraftModel | None
    draft_load_ms: float
    labels: tuple[str, ...]
    dropout_cost: DropoutCost | None = None  # where the draft tells variance
    acceptance_prior: AcceptancePrior = field(default_factory=AcceptancePrior)
    surroundings: Surroundings = field(default_factory=Surroundings)
    grammars: EdgeGrammars | None = None  # None: no session has one
    learner: Learner | None = None  # with --learn

    def session(
        self,
        prompt: str | Sequence[int],
        seed: int,
        config: RunConfig | None = None,
        draft: DraftModel | None = None,
        depth: DepthPolicy | None = None,
    ) -> EdgeSession:
        """Returns a session. `prompt` is text or token ids; `config` is this session's own configuration, `draft`
        replaces the loaded one where several sessions share it, and `depth` the configured policy. Raises
        `UsageError` for parameters out of range, for an empty prompt and for a mode that needs a draft where none is
        loaded."""
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not prompt_ids:
            raise UsageError("the prompt is empty")
        config = config or self.config
        check_method(config)
        gating = gate_settings(config)
        options = self._make_options(config, seed)
        session_id = self.surroundings.new_session_id()
        conditions = Conditions(
            SETTINGS.branch_prior_hit_share if config.pipelining.guesses == "auto" else 0.0,
            is_copied=config.draft.strategy in WITHOUT_MODEL,
            is_local=self.surroundings.is_local(config),
        )
        window = make_window(config, conditions)
        renew_decode = partial(self.tokenizer.decoder, prompt_ids, config.stop.show_special_tokens)
        is_observed = config.depth_policy == "optimal" or window.policy is not None or options.adapts_trees
        session = EdgeSession(
            prompt_ids,
            options,
            decode=renew_decode(),
            renew_decode=renew_decode,
            verifier=_create_verifier(
                config, options, session_id, self.surroundings, self.tokenizer.num_tokens
            ),
            draft=self._draft_for(options.mode, draft),
            depth=depth
            or create_depth_policy(config.depth_policy, config.depth.num_speculative_tokens, conditions),
            window=window,
            conditions=conditions if is_observed else None,
            gate=create_gate(gating, self.draft, self.tokenizer.decoder),
            acceptance_prior=self.acceptance_prior,
            learner=self.learner if options.mode.has_rounds else None,
            session_id=session_id,
            min_draft_s=config.min_draft_ms / 1e3,
            clock=self.surroundings.clock,
        )
        stats = session.result.stats
        stats.draft_load_ms = self.draft_load_ms
        if (cost := self.dropout_cost) is not None:
            stats.mc_dropout_ms, stats.mc_dropout_ratio = round(cost.extra_ms, 4), round(cost.ratio, 4)
        return session

    def _draft_for(self, mode: ExecutionMode, draft: DraftModel | None) -> DraftModel | None:
        if not mode.has_draft:
            return None
        if self.draft is None:
            raise UsageError(f"mode {mode} drafts here, and no draft was loaded")
        return draft or self.draft

    def _make_options(self, config: RunConfig, seed: int) -> SessionOptions:
        num_tokens = self.tokenizer.num_tokens
        sampling = make_sampling(config, seed, tuple(map(self._encode_word, config.sampling.bad_word)))
        if (grammar := make_grammar(config.grammar)) is not None:
            assert self.grammars is not None, "an edge with a tokenizer compiles grammars"
            sampling = replace(sampling, grammar=self.grammars.compile(grammar))
        stop = StopParams(
            UNLIMITED_TOKENS if config.max_new_tokens is None else config.max_new_tokens,
            config.stop.token_ids,
            config.stop.strings,
            config.stop.ignore_eos,
            config.stop.show_special_tokens,
            config.stop.min_new_tokens,
        )
        try:
            check_sampling_params(sampling, num_tokens)
            check_stop_params(stop, num_tokens)
        except InvalidFieldError as error:
            raise UsageError(f"{_setting(error.field)}: {error.reason}") from error
        return SessionOptions(
            mode=config.mode,
            draft_source=draft_source(config),
            sampling=sampling,
            stop=stop,
            method=config.verification.method,
            method_params=make_method_params(config),
            support_size=support_size(config),
            num_logprobs=config.logprobs,
            on_timeout=config.outage.on_timeout,
            recover_timeout_s=config.outage.recover_timeout_s,
            is_reverified=config.outage.reverify,
            is_target_change_allowed=config.outage.allow_target_change,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            tree=tree_budget(config),
            adapts_trees=tree_use(config) == "auto",
        )

    def _encode_word(self, word: str) -> TokenIds:
        return tuple(self.tokenizer.encode(word, is_complete=True))  # a word begins no text

    def close(self) -> None:
        """Frees the draft and the grammars."""
        if self.grammars is not None:
            self.grammars.close()
        if self.draft is not None:
            self.draft.close()
        if self.learner is not None:
            self.learner.close()


OpenDraft = Callable[[RunConfig, Path, EdgeTokenizer], DraftModel]
"""Opens a draft of a configuration, in the directory of the given tokenizer. Raises `ModelError` and `UsageError`."""


def create_edge(
    config: RunConfig,
    has_draft: bool | None = None,
    open_draft: OpenDraft | None = None,
    surroundings: Surroundings | None = None,
) -> Edge:
    """Loads the tokenizer and, where the mode drafts here or `has_draft` is true, the draft: the one that `open_draft`
    opens, else that of the configuration. Raises `ModelError`, `IncompatibleError`, and `UsageError` for flags that do
    not go together."""
    check_settings(config)  # before anything is loaded
    directory = draft_dir(config)
    if has_draft is None:
        has_draft = config.mode.has_draft
    if not directory.is_dir():
        hint = (
            "no draft at {}: name one with --draft DIR (`edge-client draft export` makes one)"
            if has_draft
            else "no tokenizer at {}: name a directory with the target's tokenizer.json with --draft DIR"
        )
        if config.draft.directory.isdecimal():
            hint += f"; for the draft length give --num-speculative-tokens {config.draft.directory}"
        raise UsageError(hint.format(directory))
    tokenizer = EdgeTokenizer(directory / "tokenizer.json")
    start_s = time.perf_counter()
    draft = (open_draft or _create_draft)(config, directory, tokenizer) if has_draft else None
    load_ms = (time.perf_counter() - start_s) * 1e3
    is_slowed = has_draft and config.min_draft_ms > 0
    labels = [f"min-draft-ms={config.min_draft_ms:g}"] if is_slowed else []
    if config.preset.name == BIG_LITTLE:
        labels.append(f"preset={BIG_LITTLE} (approximate)")
    eos_token_ids = tuple(draft.eos_token_ids) if draft is not None else ()
    return Edge(
        config,
        tokenizer,
        draft,
        load_ms,
        tuple(labels),
        _dropout_cost(draft),
        surroundings=surroundings or Surroundings(),
        grammars=EdgeGrammars(directory / "tokenizer.json", tokenizer.num_tokens, eos_token_ids),
        learner=_learner(config, draft),
    )


def check_settings(config: RunConfig) -> None:
    """Raises `UsageError` for settings that do not go together, `ConfigError` for a file of theirs."""
    check_method(config)
    gate_settings(config)
    tree_budget(config)
    make_window(config)


def _create_draft(config: RunConfig, directory: Path, tokenizer: EdgeTokenizer) -> DraftModel:
    gating = gate_settings(config)
    draft = create_draft_model(
        config.draft.strategy,
        directory,
        threads=config.draft.threads,
        has_variance=gating is not None and gating.thresholds.variance is not None,
        backend=config.draft.runtime,
        copies=config.draft.copies,
    )
    if draft.tokenizer_fingerprint != tokenizer.fingerprint:
        draft.close()
        raise IncompatibleError(
            f"{directory / 'tokenizer.json'} is not the tokenizer that this draft was exported with",
            "restore that file, or export the draft again: `edge-client draft export`",
        )
    return draft


def _learner(config: RunConfig, draft: DraftModel | None) -> Learner | None:
    """Lets the draft learn with --learn. Raises `ModelError` for a draft that cannot, `UsageError` for a directory that
    cannot be made."""
    if config.draft.learn is None or draft is None:
        return None
    from outrider.edge_client.drafting.onnx.model import OnnxDraftModel

    model = draft.innermost if isinstance(draft, UnionModel) else draft
    assert isinstance(model, OnnxDraftModel), "`check_method` refuses others"
    return model.learn(config.draft.learn)


def _dropout_cost(draft: DraftModel | None) -> DropoutCost | None:
    if draft is None or "variance" not in draft.signal_names:
        return None
    from outrider.edge_client.drafting.onnx.model import OnnxDraftModel

    return draft.dropout_cost() if isinstance(draft, OnnxDraftModel) else None


def _create_verifier(
    config: RunConfig,
    options: SessionOptions,
    session_id: bytes,
    surroundings: Surroundings,
    num_tokens: int,
) -> RemoteVerifier | None:
    if options.mode is ExecutionMode.EDGE_ONLY:
        return None
    timeout_ms = config.outage.timeout_ms
    return RemoteVerifier(
        surroundings.create_link(config, session_id),
        RoundDeadline(timeout_ms / 1e3 if timeout_ms else None),
        recover_timeout_s=config.outage.recover_timeout_s,
        is_patient=options.on_timeout is OnTimeout.WAIT,
        num_tokens=num_tokens,
        clock=surroundings.clock,
        threads=surroundings.threads,
    )


def make_window(config: RunConfig, conditions: Conditions | None = None) -> RoundWindow:
    """Returns the limit on rounds in flight, and what chooses the mode where that is left open, by `conditions`.
    Raises `UsageError` for flags that would have no effect."""
    _check_pipelining(config)
    pipelining = config.pipelining.use
    is_ordered = config.connection.transport != "unary"  # single calls may arrive in another order
    may_choose = config.may_adapt and is_ordered and config.mode.has_rounds
    if pipelining is Pipelining.AUTO and not may_choose:
        pipelining = Pipelining.OFF
    num_rounds = config.pipelining.num_rounds_in_flight
    if num_rounds is not None and pipelining is Pipelining.OFF:
        raise UsageError(f"--num-rounds-in-flight {num_rounds} goes with --pipeline on or auto")
    return create_window(
        pipelining,
        num_rounds,
        config.depth_policy,
        num_speculative_tokens=config.depth.num_speculative_tokens,
        has_stream_too=config.mode is ExecutionMode.AUTO and config.may_adapt,
        may_branch=config.pipelining.guesses == "auto",
        conditions=conditions,
        has_trees=tree_use(config) == "auto",
    )


def _check_pipelining(config: RunConfig) -> None:
    mode, use = config.mode, config.pipelining.use
    flag = f"--pipeline {use}"
    if use is not Pipelining.ON:
        return
    if not mode.has_rounds:
        raise UsageError(f"{flag} goes with --mode speculative: in mode {mode} the edge sends no rounds")
    if config.connection.transport == "unary":
        raise UsageError(f"{flag} needs --transport stream")


def _setting(field: str) -> str:
    """Returns the key and the flag of a request's field."""
    name = field.removeprefix("sampling.")
    key = {"bad_words": "bad_word", "stop_token_ids": "stop_token_id", "stop_strings": "stop"}.get(name, name)
    return f"{key} (--{key.replace('_', '-')})"


def draw_seed() -> int:
    """Returns a random seed of 53 bits, which every JSON reader keeps exactly."""
    return secrets.randbits(53)


def make_sampling(config: RunConfig, seed: int, bad_words: tuple[TokenIds, ...] = ()) -> SamplingParams:
    """Returns the sampling parameters that draft and target share, rounded as on the wire. Raises `UsageError`
    for a bad bias."""
    section = config.sampling
    params = SamplingParams(
        temperature=section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        min_p=section.min_p,
        repetition_penalty=section.repetition_penalty,
        presence_penalty=section.presence_penalty,
        frequency_penalty=section.frequency_penalty,
        logit_bias=_parse_biases(section.logit_bias),
        bad_words=bad_words,
        min_new_tokens=config.stop.min_new_tokens,
        seed=seed,
    )
    return on_wire(params)


def _parse_biases(entries: tuple[str, ...]) -> tuple[tuple[int, float], ...]:
    biases = []
    for entry in (part for text in entries for part in text.split(",")):
        token_id, separator, bias = entry.partition(":")
        try:
            biases.append((int(token_id), float(bias)))
        except ValueError:
            raise UsageError(f"--logit-bias {entry}: want ID:B, for example 42:-1.5") from None
        assert separator
    return tuple(biases)
