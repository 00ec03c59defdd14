"""Rounds recorded once with a real pair, to be replayed without a draft model.

With `coupled` a text is a function of target, prompt, parameters and seed, so a recorded round gets the same
verdict from every verifier of the same target: what a replay hears back can be checked, token for token.

    python -m experiments.recorded_drafts --out FILE [--sessions 32 --rounds 24]
    python -m experiments.recorded_drafts --stub --out FILE        for `python -m experiments.stub_target`
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common.alignment import TokenChain
from common.errors import LinkError, OutriderError, UsageError
from common.types import (
    CloseRequest,
    ModelInfo,
    Opened,
    OpenRequest,
    Progress,
    SamplingParams,
    SessionRequest,
    SessionResponse,
    TokenIds,
    Verdict,
    VerifyRequest,
)
from edge_client.drafting.base import DraftModel
from edge_client.link.base import Connection
from edge_client.session import new_session_id
from experiments.prompts import load_prompts

FORMAT = 1
ANSWER_S = 60.0
# Greedy, plain sampling, every truncation, penalties: one after the other over the sessions.
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.95),
    SamplingParams(temperature=0.8, repetition_penalty=1.1),
    SamplingParams(temperature=0.7, min_p=0.05),
    SamplingParams(temperature=0.0, presence_penalty=0.4, frequency_penalty=0.2),
)

Ask = Callable[[SessionRequest], SessionResponse]
"""Sends one request of a session and returns its final answer."""


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """A draft and what the target said to it; `token_ids` are what the round committed."""

    draft_tokens: TokenIds
    draft_probs: tuple[float, ...]
    accepted_len: int
    correction: int

    @property
    def token_ids(self) -> TokenIds:
        return (*self.draft_tokens[: self.accepted_len], self.correction)


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """One text from its prompt on. End-of-text is ignored, so that every round commits a token."""

    prompt_ids: TokenIds
    sampling: SamplingParams
    first_token: int
    rounds: tuple[RecordedRound, ...]

    @property
    def output_ids(self) -> TokenIds:
        return (self.first_token, *(t for each in self.rounds for t in each.token_ids))

    def opening(self, session_id: bytes) -> OpenRequest:
        return OpenRequest(
            session_id, self.prompt_ids, len(self.prompt_ids), self.sampling, ignore_eos=True, round_id=1
        )

    def requests(self) -> list[tuple[VerifyRequest, int, int]]:
        """Per round: the request (round ids from 2), and position and hash of the text after it."""
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
    """Sessions, and the target they are true of."""

    target_fingerprint: str
    dtype: str
    sessions: tuple[RecordedSession, ...]

    def check_target(self, model: ModelInfo) -> None:
        """Raises `UsageError` when `model` is another target, of which these texts are not true."""
        if (model.target_fingerprint, model.dtype) != (self.target_fingerprint, self.dtype):
            raise UsageError(
                f"--recording: made with target {self.target_fingerprint} in {self.dtype}, but the verifier "
                f"serves {model.target_fingerprint} in {model.dtype}: make another with "
                "python -m experiments.recorded_drafts"
            )

    def save(self, path: Path) -> Path:
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
    rounds = tuple(
        RecordedRound(tuple(r["draft_tokens"]), tuple(r["draft_probs"]), r["accepted_len"], r["correction"])
        for r in record["rounds"]
    )
    return RecordedSession(
        tuple(record["prompt_ids"]), SamplingParams(**sampling), record["first_token"], rounds
    )


# ---------------------------------------------------------------------------------------- recording


def ask(connection: Connection, request: SessionRequest) -> SessionResponse:
    """Sends one request, waits for its final answer. Raises `LinkError`, after `ANSWER_S` of silence too."""
    connection.send(request)
    while isinstance(reply := connection.receive(ANSWER_S), Progress):
        pass
    if reply is None:
        raise LinkError(f"no answer within {ANSWER_S:g} s")
    return reply


def record_session(
    ask: Ask,
    session_id: bytes,
    draft: DraftModel,
    prompt_ids: TokenIds,
    sampling: SamplingParams,
    *,
    num_rounds: int,
    num_draft_tokens: int,
) -> RecordedSession:
    """Opens, runs `num_rounds` real rounds and closes. Raises RuntimeError for any other answer."""
    session = RecordedSession(prompt_ids, sampling, 0, ())
    opened = ask(session.opening(session_id))
    if not isinstance(opened, Opened):
        raise RuntimeError(f"an opening was answered by {opened}")
    sequence = draft.sequence(sampling, num_prompt_tokens=len(prompt_ids))
    sequence.commit((*prompt_ids, opened.first_token))
    rounds: list[RecordedRound] = []
    position, hash_ = opened.position, opened.hash
    for round_id in range(2, num_rounds + 2):
        proposal = sequence.propose(num_draft_tokens)
        request = VerifyRequest(
            round_id,
            position,
            hash_,
            draft_tokens=proposal.token_ids,
            q_token_probs=proposal.draft_probs,
        )
        verdict = ask(request)
        if not isinstance(verdict, Verdict):
            raise RuntimeError(f"a round was answered by {verdict}")
        rounds.append(
            RecordedRound(proposal.token_ids, proposal.draft_probs, verdict.accepted_len, verdict.correction)
        )
        sequence.commit(rounds[-1].token_ids)
        position, hash_ = verdict.position, verdict.hash
    sequence.close()
    ask(CloseRequest())
    return RecordedSession(prompt_ids, sampling, opened.first_token, tuple(rounds))


def record(
    address: str,
    draft: DraftModel,
    prompts: Sequence[TokenIds],
    *,
    num_sessions: int = 32,
    num_rounds: int = 24,
    num_draft_tokens: int = 4,
    samplings: Sequence[SamplingParams] = SAMPLINGS,
    on_session: Callable[[int], None] = lambda number: None,
) -> Recording:
    """One session after the other, each alone in the verifier: prompts and `samplings` in turn, own seeds."""
    from edge_client.link.grpc_link import GrpcLink

    sessions = []
    model = GrpcLink(address, new_session_id()).describe(10.0)
    for number in range(num_sessions):
        sampling = replace(samplings[number % len(samplings)], seed=1000 + number)
        session_id = new_session_id()
        connection = GrpcLink(address, session_id).connect(10.0)
        # A text may not begin twice alike, or the sessions would share its prefix.
        prompt_ids = (number % model.num_tokens, *prompts[number % len(prompts)])

        sessions.append(
            record_session(
                partial(ask, connection),
                session_id,
                draft,
                prompt_ids,
                sampling,
                num_rounds=num_rounds,
                num_draft_tokens=num_draft_tokens,
            )
        )
        connection.close()
        on_session(number)
    return Recording(model.target_fingerprint, model.dtype, tuple(sessions))


def record_embedded(address: str, *, num_sessions: int = 32, num_rounds: int = 24) -> Recording:
    """The embedded draft and prompts against the verifier at `address`; shows progress."""
    from edge_client.drafting.onnx_model import OnnxDraftModel
    from edge_client.tokenizer import EdgeTokenizer
    from experiments.decoding import EMBEDDED

    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    prompts = [tuple(tokenizer.encode(prompt.text)) for prompt in load_prompts()]

    def show(number: int) -> None:
        if (number + 1) % 8 == 0 or number + 1 == num_sessions:
            print(f"  recording: session {number + 1} of {num_sessions}", file=sys.stderr, flush=True)

    with OnnxDraftModel.open(EMBEDDED / "draft") as draft:
        recording = record(
            address, draft, prompts, num_sessions=num_sessions, num_rounds=num_rounds, on_session=show
        )
    return recording


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.recorded_drafts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--sessions", type=int, default=32, metavar="N")
    parser.add_argument("--rounds", type=int, default=24, metavar="N", help="rounds a session")
    parser.add_argument("--verifier", metavar="HOST:PORT", help="a running one; default: start one")
    parser.add_argument("--stub", action="store_true", help="what the stub target answers; needs no model")
    arguments = parser.parse_args()
    if arguments.stub:
        from experiments.stub_target import stub_recording

        recording = stub_recording(arguments.sessions, arguments.rounds)
    elif arguments.verifier:
        recording = record_embedded(
            arguments.verifier, num_sessions=arguments.sessions, num_rounds=arguments.rounds
        )
    else:
        from experiments.processes import running_verifier

        with running_verifier("--log-level", "warning") as verifier:
            recording = record_embedded(
                verifier.address, num_sessions=arguments.sessions, num_rounds=arguments.rounds
            )
    recording.save(arguments.out)
    print(f"{len(recording.sessions)} sessions written to {arguments.out}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OutriderError as error:
        print(f"recorded_drafts: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
