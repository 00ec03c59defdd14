"""Makes the texts and signals of a calibration with a loaded draft and, where one is named, a verifier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from outrider.common.config.loader import with_values
from outrider.common.errors import RoundFailedError
from outrider.common.methods import num_support
from outrider.common.types import (
    Origin,
    TokenIds,
)
from outrider.edge_client.calibration.curve import KEEP_ALL, NO_GATE, Curve, Write, Written, measure_curve
from outrider.edge_client.calibration.passages import Passage
from outrider.edge_client.calibration.quantiles import Sample, draft_along, thresholds_at
from outrider.edge_client.config.draft_sections import GateConfig
from outrider.edge_client.config.gate import without_gate
from outrider.edge_client.config.methods import support_size
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.controller.depth.registry import create_depth_policy
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, Pipelining
from outrider.edge_client.gate.gate import GateUse
from outrider.edge_client.gate.thresholds import GateThresholds
from outrider.edge_client.session.factory import Edge, create_link, make_sampling
from outrider.edge_client.session.scoring import LEAST_NATS, text_logprobs
from outrider.edge_client.session.session import SessionResult, new_session_id
from outrider.edge_client.transport.link.base import VerifierLink


def target_nats(
    link: VerifierLink, session_id: bytes, prompt_ids: Sequence[int], text_ids: Sequence[int]
) -> float | None:
    """Returns the loss of `text_ids` after the prompt in nats, summed, at temperature 1; None where the
    verifier does not offer the method. Raises `OutriderError` as a session does."""
    try:
        found = text_logprobs(link, session_id, prompt_ids, text_ids)
    except RoundFailedError as error:
        if error.error.field == "method":
            return None
        raise
    return -sum(LEAST_NATS if each is None else each.raw_logprob for each in found)


class Calibration:
    """Writes texts of at most `num_new` tokens after passages. Passage i uses the i-th seed after the
    configured one, or after 1. `on_text` is called after each text, with its purpose."""

    def __init__(
        self,
        edge: Edge,
        passages: Sequence[Passage],
        asked: RunConfig,
        num_new: int,
        on_text: Callable[[str], None] = lambda what: None,
    ) -> None:
        assert edge.draft is not None, "a calibration drafts"
        self._edge, self._draft = edge, edge.draft
        self._config = with_values(ungated(asked), on_timeout=OnTimeout.WAIT, max_new_tokens=num_new)
        self._asked = asked
        self._passages = passages
        self._first_seed = first_seed(asked)
        self._on_text = on_text
        self._known_nats: dict[tuple[int, TokenIds], float | None] = {}
        self.target_fingerprint = ""

    def cloud_only(self) -> list[TokenIds]:
        """Returns the target's own text after each passage."""
        config = replace(self._config, mode=ExecutionMode.CLOUD_ONLY)
        return [self._write(index, config, "cloud-only").token_ids for index in range(len(self._passages))]

    def samples(self, texts: Sequence[TokenIds]) -> list[Sample]:
        """Returns the signals of tokens drafted along `texts`, one text a passage."""
        config = self._config
        words = tuple(tuple(self._edge.tokenizer.encode(word)) for word in config.sampling.bad_word)
        policy = create_depth_policy(config.depth_policy, config.depth.num_speculative_tokens)
        num_ids = num_support(config.verification.method, support_size(config))
        found: list[Sample] = []
        for index, (passage, text) in enumerate(zip(self._passages, texts, strict=True)):
            sampling = make_sampling(config, self._first_seed + index, words)
            depth = max(1, policy.next_depth())
            found += draft_along(self._draft, sampling, num_ids, passage.prompt_ids, text, depth)
            self._on_text("drafting along")
        return found

    def curve(
        self,
        references: Sequence[TokenIds],
        samples: Sequence[Sample],
        percentiles: Sequence[float],
        gate_file: Path,
    ) -> Curve:
        """Returns the curve: without a gate, at each percentile, and keeping all. Rules, words and the hard
        ratio are those of the gate file."""
        signals = [sample.signals for sample in samples]
        gates = [(f"{each:g}", thresholds_at(signals, each)) for each in sorted(percentiles)]
        gates.append((KEEP_ALL, _nothing_is_hard(gates[0][1])))
        writers = [(NO_GATE, self._writer(NO_GATE, self._config))]
        writers += [(name, self._writer(name, self._gated(each, gate_file))) for name, each in gates]
        return measure_curve(references, writers, self._nats)

    def _gated(self, thresholds: GateThresholds, gate_file: Path) -> RunConfig:
        asked = self._asked.gate
        gate = GateConfig(
            GateUse.COMMIT,
            file=gate_file,
            ner=asked.ner,
            rare_per_million=asked.rare_per_million,
            **asdict(thresholds),
        )
        return replace(self._config, gate=gate)

    def _writer(self, name: str, config: RunConfig) -> Write:
        def write(index: int) -> Written:
            result = self._write(index, config, name)
            num_calls = sum(each.is_answered for each in result.stats.rounds)
            return Written(result.token_ids, num_calls, result.origins.count(Origin.GATE))

        return write

    def _write(self, index: int, config: RunConfig, what: str) -> SessionResult:
        prompt_ids = self._passages[index].prompt_ids
        session = self._edge.session(prompt_ids, self._first_seed + index, config)
        for _ in session.generate():
            pass
        if (model := session.result.model) is not None:
            self.target_fingerprint = model.target_fingerprint
        self._on_text(what)
        return session.result

    def _nats(self, index: int, token_ids: TokenIds) -> float | None:
        key = index, token_ids
        if key not in self._known_nats:
            session_id = new_session_id()
            link = create_link(self._config, session_id)
            prompt_ids = self._passages[index].prompt_ids
            self._known_nats[key] = target_nats(link, session_id, prompt_ids, token_ids)
        return self._known_nats[key]


def first_seed(config: RunConfig) -> int:
    """Returns the first passage's seed."""
    return 1 if config.seed is None else config.seed


def _nothing_is_hard(like: GateThresholds) -> GateThresholds:
    """Returns thresholds of the same signals that no token passes; only rules and the ends of texts then call
    the target."""
    return GateThresholds(**{name: 0.0 if name == "margin" else math.inf for name in like.names})


def ungated(config: RunConfig) -> RunConfig:
    """Returns the configuration without a gate, in synchronous rounds, with nothing reverified."""
    return with_values(
        without_gate(config), mode=ExecutionMode.SPECULATIVE, pipeline=Pipelining.OFF, reverify=False
    )


def with_variance(config: RunConfig) -> RunConfig:
    """Returns a configuration whose draft measures the variance: with a gate that looks at it."""
    return with_values(config, gate=GateUse.STOP, gate_variance=0.0)
