"""From a configuration to a session: parameters checked, parts created, heavy imports made."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.common.errors import IncompatibleError, InvalidFieldError, UsageError
from outrider.common.sampling.processors import check_sampling_params
from outrider.common.stopping import check_stop_params
from outrider.common.types import Method, SamplingParams, StopParams, TokenIds
from outrider.edge_client.config.gate import create_gate, gate_settings
from outrider.edge_client.config.methods import check_method, make_method_params, support_size
from outrider.edge_client.config.run_config import RunConfig, default_draft_dir
from outrider.edge_client.controller.acceptance_prior import Experience
from outrider.edge_client.controller.depth.registry import create_depth_policy
from outrider.edge_client.controller.window import Pipelining, RoundWindow, create_window
from outrider.edge_client.core.options import Mode, OnTimeout, SessionOptions
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.onnx.dropout_cost import DropoutCost
from outrider.edge_client.drafting.registry import WITHOUT_MODEL, create_draft_model
from outrider.edge_client.session.session import EdgeSession, new_session_id
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

if TYPE_CHECKING:
    from outrider.edge_client.transport.link.grpc_link import GrpcLink


@dataclass(slots=True)
class Edge:
    """What outlives one session: the tokenizer, the draft's weights, and what its texts taught."""

    config: RunConfig
    tokenizer: EdgeTokenizer
    draft: DraftModel | None
    draft_load_ms: float
    labels: tuple[str, ...]
    dropout_cost: DropoutCost | None = None  # where the draft tells variance
    experience: Experience = field(default_factory=Experience)

    def session(
        self,
        prompt: str | Sequence[int],
        seed: int,
        config: RunConfig | None = None,
        draft: DraftModel | None = None,
    ) -> EdgeSession:
        """`prompt` is text or token ids; `config` is this session's own and `draft` a stand-in for the loaded
        one, where several sessions share this. Raises `UsageError` for parameters out of range, for an
        empty prompt and for a mode that needs a draft where none was loaded."""
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not prompt_ids:
            raise UsageError("the prompt is empty")
        config = config or self.config
        check_method(config)
        gating = gate_settings(config)
        options = self._make_options(config, seed)
        session_id = new_session_id()
        session = EdgeSession(
            prompt_ids,
            options,
            decode=self.tokenizer.decoder(prompt_ids),
            renew_decode=lambda: self.tokenizer.decoder(prompt_ids),
            verifier=_create_verifier(config, options, session_id),
            draft=self._draft_for(options.mode, draft),
            depth=create_depth_policy(config.depth_policy, config.num_speculative_tokens),
            window=make_window(config),
            gate=create_gate(gating, self.draft, self.tokenizer.decoder),
            experience=self.experience,
            session_id=session_id,
            min_draft_s=config.min_draft_ms / 1e3,
        )
        stats = session.result.stats
        stats.draft_load_ms = self.draft_load_ms
        if (cost := self.dropout_cost) is not None:
            stats.mc_dropout_ms, stats.mc_dropout_ratio = round(cost.extra_ms, 4), round(cost.ratio, 4)
        return session

    def _draft_for(self, mode: Mode, draft: DraftModel | None) -> DraftModel | None:
        if not mode.has_draft:
            return None
        if self.draft is None:
            raise UsageError(f"mode {mode} drafts here, and no draft was loaded")
        return draft or self.draft

    def _make_options(self, config: RunConfig, seed: int) -> SessionOptions:
        num_tokens = self.tokenizer.num_tokens
        sampling = make_sampling(config, seed, tuple(self._encode_word(word) for word in config.bad_word))
        stop = StopParams(config.max_new_tokens, config.stop_token_id, config.stop, config.ignore_eos)
        try:
            check_sampling_params(sampling, num_tokens)
            check_stop_params(stop, num_tokens)
        except InvalidFieldError as error:
            raise UsageError(f"{_setting(error.field)}: {error.reason}") from error
        return SessionOptions(
            mode=Mode(config.mode),
            sampling=sampling,
            stop=stop,
            method=Method(config.method),
            method_params=make_method_params(config),
            support_size=support_size(config),
            num_logprobs=config.logprobs,
            on_timeout=OnTimeout(config.on_timeout),
            recover_timeout_s=config.recover_timeout_s,
            is_reverified=config.reverify,
            is_target_change_allowed=config.allow_target_change,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
        )

    def _encode_word(self, word: str) -> TokenIds:
        return tuple(self.tokenizer.encode(word))

    def close(self) -> None:
        if self.draft is not None:
            self.draft.close()


def create_edge(config: RunConfig, has_draft: bool | None = None) -> Edge:
    """Loads the tokenizer and, where the edge drafts (or `has_draft` says so), the draft. Raises
    `ModelError`, `IncompatibleError`; `UsageError` for flags that do not go together."""
    check_method(config)
    gate_settings(config)
    make_window(config)  # flags that do not go together are said before anything is loaded
    directory = Path(config.draft) if config.draft else default_draft_dir()
    if has_draft is None:
        has_draft = Mode(config.mode).has_draft
    if not directory.is_dir():
        hint = (
            "no draft at {}: name one with --draft DIR (`edge-client draft export` makes one)"
            if has_draft
            else "no tokenizer at {}: name a directory with the target's tokenizer.json with --draft DIR"
        )
        raise UsageError(hint.format(directory))
    tokenizer = EdgeTokenizer(directory / "tokenizer.json")
    start_s = time.perf_counter()
    draft = _create_draft(config, directory, tokenizer) if has_draft else None
    load_ms = (time.perf_counter() - start_s) * 1e3
    is_slowed = has_draft and config.min_draft_ms > 0
    labels = (f"min-draft-ms={config.min_draft_ms:g}",) if is_slowed else ()
    return Edge(config, tokenizer, draft, load_ms, labels, _dropout_cost(draft))


def _create_draft(config: RunConfig, directory: Path, tokenizer: EdgeTokenizer) -> DraftModel:
    strategy = config.draft_strategy
    if config.mode == Mode.EDGE_ONLY and strategy in WITHOUT_MODEL:
        raise UsageError(
            f"--mode edge-only needs a model to write with, and --draft-strategy {strategy} has none"
        )
    gating = gate_settings(config)
    draft = create_draft_model(
        strategy,
        directory,
        threads=config.draft_threads,
        max_ngram=config.lookup_ngram,
        has_variance=gating is not None and gating.thresholds.variance is not None,
    )
    if draft.tokenizer_fingerprint != tokenizer.fingerprint:
        theirs, ours = draft.tokenizer_fingerprint, tokenizer.fingerprint
        draft.close()
        raise IncompatibleError(f"the draft was exported with tokenizer {theirs}, but beside it lies {ours}")
    return draft


def _dropout_cost(draft: DraftModel | None) -> DropoutCost | None:
    if draft is None or "variance" not in draft.signal_names:
        return None
    from outrider.edge_client.drafting.onnx.model import OnnxDraftModel

    return draft.dropout_cost() if isinstance(draft, OnnxDraftModel) else None


def _create_verifier(config: RunConfig, options: SessionOptions, session_id: bytes) -> RemoteVerifier | None:
    if options.mode is Mode.EDGE_ONLY:
        return None
    return RemoteVerifier(
        create_link(config, session_id),
        RoundDeadline(config.timeout_ms / 1e3 if config.timeout_ms else None),
        recover_timeout_s=config.recover_timeout_s,
        is_patient=options.on_timeout is OnTimeout.WAIT,
    )


def create_link(config: RunConfig, session_id: bytes) -> GrpcLink:
    """Raises `UsageError` for a malformed address, and for flags of TLS and tokens that cannot be used."""
    from outrider.edge_client.transport.link.grpc_link import GrpcLink
    from outrider.edge_client.transport.link.security import link_security

    return GrpcLink(config.verifier, session_id, config.transport, link_security(config, config.verifier))


def make_window(config: RunConfig) -> RoundWindow:
    """Raises `UsageError` for flags that would have no effect. Single calls keep no order, a stream does."""
    _check_pipelining(config)
    pipelining, is_auto = Pipelining(config.pipeline), config.mode == Mode.AUTO
    if is_auto and config.transport != "unary":
        pipelining = Pipelining.AUTO
    num_rounds = config.num_rounds_in_flight
    if num_rounds is not None and pipelining is Pipelining.OFF:
        raise UsageError(f"--num-rounds-in-flight {num_rounds} goes with --pipeline on or auto")
    return create_window(
        pipelining,
        num_rounds,
        config.depth_policy,
        has_stream_too=is_auto,
        may_guess=config.guesses == "auto",
    )


def _check_pipelining(config: RunConfig) -> None:
    mode, flag = Mode(config.mode), f"--pipeline {config.pipeline}"
    if config.pipeline == Pipelining.OFF:
        return
    if mode not in (Mode.SPECULATIVE, Mode.AUTO):
        raise UsageError(f"{flag} goes with --mode speculative: in mode {mode} the edge sends no rounds")
    if config.transport == "unary":
        raise UsageError(f"{flag} needs --transport stream")
    if mode is Mode.AUTO and config.pipeline == Pipelining.ON:
        raise UsageError(f"{flag} goes with --mode speculative: mode auto decides it by itself")


def _setting(field: str) -> str:
    """The key and the flag of what a request has in `field`."""
    name = field.removeprefix("sampling.")
    key = {"bad_words": "bad_word", "stop_token_ids": "stop_token_id", "stop_strings": "stop"}.get(name, name)
    return f"{key} (--{key.replace('_', '-')})"


def draw_seed() -> int:
    """53 bits: every JSON reader keeps them exactly."""
    return secrets.randbits(53)


def make_sampling(config: RunConfig, seed: int, bad_words: tuple[TokenIds, ...] = ()) -> SamplingParams:
    return SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        logit_bias=_parse_biases(config.logit_bias),
        bad_words=bad_words,
        min_new_tokens=config.min_new_tokens,
        seed=seed,
    )


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
