"""Recorded sessions as data: what was drafted, and what the target said; one JSON line each.

With `coupled` a text is a function of target, prompt, parameters and seed, so a recorded round gets the same
verdict from every verifier of the same target: what a replay hears back can be checked, token for token.
`outrider.experiments.load.record` makes them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from outrider.common.alignment import TokenChain
from outrider.common.errors import UsageError
from outrider.common.types import ModelInfo, OpenRequest, SamplingParams, TokenIds, VerifyRequest
from outrider.experiments.shared.acceptance_traces import TextTrace
from outrider.experiments.simulator.parts.drafts import KnownText, TracedText

FORMAT = 1


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """Holds a draft and the verdict on it; `token_ids` are what the round committed."""

    draft_tokens: TokenIds
    draft_probs: tuple[float, ...]
    accepted_len: int
    correction: int

    @property
    def token_ids(self) -> TokenIds:
        """Returns the accepted tokens and the correction."""
        return (*self.draft_tokens[: self.accepted_len], self.correction)


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """Holds a text and what the draft proposes at each of its positions, for drafts of any length up to
    `acceptance_traces.MAX_DEPTH`. Position i is that after the first i + 1 new tokens."""

    text: TokenIds  # all new tokens: MAX_DEPTH + 1 more than there are positions
    runs: tuple[int, ...]  # [num_positions]: drafted tokens that are accepted
    confidences: tuple[tuple[float, ...], ...]  # [num_positions][MAX_DEPTH]: of the draft in its tokens

    def known_text(self, prompt_ids: TokenIds) -> KnownText:
        """Returns the text as a traced draft takes it."""
        runs = np.array(self.runs, np.uint8)
        trace = TextTrace(runs, np.array(self.confidences, np.float32).reshape(len(runs), -1))
        return KnownText(prompt_ids, self.text, TracedText(trace))


@dataclass(frozen=True)
class RecordedSession:
    """Holds one text from its prompt on, as the rounds of one draft length or as a trace for any. End-of-text is
    ignored, so that every round commits a token."""

    prompt_ids: TokenIds
    sampling: SamplingParams
    first_token: int
    rounds: tuple[RecordedRound, ...]
    trace: RecordedTrace | None = None

    @cached_property
    def output_ids(self) -> TokenIds:
        """Returns the new tokens."""
        if self.trace is not None:
            return self.trace.text
        return (self.first_token, *(t for each in self.rounds for t in each.token_ids))

    def opening(self, session_id: bytes) -> OpenRequest:
        """Returns the request that opens the session."""
        return OpenRequest(
            session_id, self.prompt_ids, len(self.prompt_ids), self.sampling, ignore_eos=True, round_id=1
        )

    def requests(self) -> list[tuple[VerifyRequest, int, int]]:
        """Returns per round: the request (round ids from 2), and position and hash of the text after it."""
        chain = TokenChain((*self.prompt_ids, self.first_token))
        found = []
        for number, each in enumerate(self.rounds):
            base_position, base_hash = chain.position, chain.hash
            chain.extend(each.token_ids)
            request = VerifyRequest(
                round_id=number + 2,
                base_position=base_position,
                base_hash=base_hash,
                draft_tokens=each.draft_tokens,
                q_token_probs=each.draft_probs,
            )
            found.append((request, chain.position, chain.hash))
        return found


@dataclass(frozen=True, slots=True)
class Recording:
    """Holds sessions, and the target that they were recorded with."""

    target_fingerprint: str
    dtype: str
    sessions: tuple[RecordedSession, ...]

    def check_target(self, model: ModelInfo) -> None:
        """Raises `UsageError` when `model` is another target, of which these texts are not true."""
        if (model.target_fingerprint, model.dtype) != (self.target_fingerprint, self.dtype):
            raise UsageError(
                f"--recording: made with target {self.target_fingerprint} in {self.dtype}, but the verifier "
                f"serves {model.target_fingerprint} in {model.dtype}: make another with "
                "python -m outrider.experiments.load.record"
            )

    def save(self, path: Path) -> Path:
        """Writes one JSON line a session; returns the path."""
        header = {"format": FORMAT, "target_fingerprint": self.target_fingerprint, "dtype": self.dtype}
        lines = [json.dumps(header), *(json.dumps(asdict(session)) for session in self.sessions)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Raises `UsageError` naming the file when it cannot be read or is not a recording."""
        try:
            header, *lines = path.read_text(encoding="utf-8").splitlines()
            facts = json.loads(header)
            if facts["format"] != FORMAT:
                raise ValueError(f"format {facts['format']}, want {FORMAT}")
            sessions = tuple(_session_from(json.loads(line)) for line in lines)
            return cls(facts["target_fingerprint"], facts["dtype"], sessions)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"--recording {path}: not a recording: {error}") from error


def _session_from(record: dict[str, Any]) -> RecordedSession:
    sampling = dict(record["sampling"])
    for name in ("logit_bias", "bad_words"):
        sampling[name] = tuple(tuple(entry) for entry in sampling[name])
    sampling["held_back"] = tuple(sampling.get("held_back", ()))
    rounds = tuple(
        RecordedRound(tuple(r["draft_tokens"]), tuple(r["draft_probs"]), r["accepted_len"], r["correction"])
        for r in record["rounds"]
    )
    trace = None
    if (found := record.get("trace")) is not None:
        confidences = tuple(map(tuple, found["confidences"]))
        trace = RecordedTrace(tuple(found["text"]), tuple(found["runs"]), confidences)
    return RecordedSession(
        tuple(record["prompt_ids"]), SamplingParams(**sampling), record["first_token"], rounds, trace
    )
