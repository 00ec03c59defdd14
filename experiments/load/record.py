"""Records rounds of a real pair once, to be replayed without a draft model (`outrider.experiments.load`).

python -m outrider.experiments.load.record --out FILE [--sessions 32 --rounds 24]
python -m outrider.experiments.load.record --traces 128 --out FILE
python -m outrider.experiments.load.record --stub --out FILE

With `--traces` it records what the draft proposes at each of so many positions, for drafts of any length. The last
form is for the stub of `python -m outrider.experiments.synthetic.serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from outrider.common.errors import LinkError
from outrider.common.types import (
    CloseRequest,
    Opened,
    Progress,
    SamplingParams,
    SessionRequest,
    SessionResponse,
    TokenIds,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.session.session import new_session_id
from outrider.edge_client.transport.link.base import Connection
from outrider.experiments.load.cloud import CloudStream
from outrider.experiments.load.recording import RecordedRound, RecordedSession, RecordedTrace, Recording
from outrider.experiments.load.wire import connect
from outrider.experiments.shared.acceptance_traces import MAX_DEPTH, trace_text
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.synthetic.keyed import FIRST_TOKEN, NUM_TOKENS, KeyedTokens
from outrider.experiments.synthetic.target import SyntheticBackend

DRAFTS_A_ROUND = 4
PROMPT_TOKENS = 64


def synthetic_recording(num_sessions: int = 32, num_rounds: int = 24) -> Recording:
    """Returns a recording of the default pair's target, greedy: all drafts are accepted."""
    backend = SyntheticBackend()
    tokens = KeyedTokens(backend.pair.seed)
    starts = [PROMPT_TOKENS + 1 + number * (DRAFTS_A_ROUND + 1) for number in range(num_rounds)]
    texts = [tuple(tokens.between(start, start + DRAFTS_A_ROUND + 1).tolist()) for start in starts]
    rounds = tuple(
        RecordedRound(text[:-1], (0.9,) * DRAFTS_A_ROUND, DRAFTS_A_ROUND, text[-1]) for text in texts
    )
    sessions = (
        RecordedSession(
            prompt_ids=tuple(FIRST_TOKEN + (number + i) % NUM_TOKENS for i in range(PROMPT_TOKENS)),
            sampling=SamplingParams(temperature=0.0, seed=number),
            first_token=int(tokens.between(PROMPT_TOKENS, PROMPT_TOKENS + 1)[0]),
            rounds=rounds,
        )
        for number in range(num_sessions)
    )
    return Recording(backend.fingerprint, backend.dtype, tuple(sessions))


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


def ask(connection: Connection, request: SessionRequest) -> SessionResponse:
    """Sends one request, waits for its final answer. Raises `LinkError`, after `ANSWER_S` of silence too."""
    connection.send(request)
    while isinstance(reply := connection.receive(ANSWER_S), Progress):
        pass
    if reply is None:
        raise LinkError(f"no answer within {ANSWER_S:g} s")
    return reply


def _record_session(
    ask: Ask,
    session_id: bytes,
    draft: DraftModel,
    prompt_ids: TokenIds,
    sampling: SamplingParams,
    *,
    num_rounds: int,
    num_draft_tokens: int,
) -> RecordedSession:
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
    """Records one session after the other, each alone in the verifier: prompts and `samplings` in turn,
    own seeds."""
    from outrider.edge_client.transport.link.grpc_link import GrpcLink

    sessions = []
    model = GrpcLink(address, new_session_id()).describe(10.0)
    for number in range(num_sessions):
        prompt_ids, sampling = _asked(number, model.num_tokens, prompts, samplings)
        session_id = new_session_id()
        connection = GrpcLink(address, session_id).connect(10.0)
        sessions.append(
            _record_session(
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


def _asked(
    number: int, num_tokens: int, prompts: Sequence[TokenIds], samplings: Sequence[SamplingParams]
) -> tuple[TokenIds, SamplingParams]:
    """Returns a session's prompt and sampling. No text begins twice alike, or sessions would share its prefix."""
    prompt_ids = (number % num_tokens, *prompts[number % len(prompts)])
    return prompt_ids, replace(samplings[number % len(samplings)], seed=1000 + number)


def record_traces(
    address: str,
    draft: DraftModel,
    prompts: Sequence[TokenIds],
    *,
    num_sessions: int = 32,
    num_positions: int = 128,
    samplings: Sequence[SamplingParams] = SAMPLINGS[:2],
    on_session: Callable[[int], None] = lambda number: None,
) -> Recording:
    """Records texts that the target writes, all at once, and then what the draft proposes at each position."""
    from outrider.edge_client.transport.link.grpc_link import GrpcLink

    model = GrpcLink(address, new_session_id()).describe(10.0)
    asked = [_asked(number, model.num_tokens, prompts, samplings) for number in range(num_sessions)]
    texts = asyncio.run(_decode(address, asked, num_positions + MAX_DEPTH + 1))
    sessions = []
    for number, ((prompt_ids, sampling), text) in enumerate(zip(asked, texts, strict=True)):
        found = trace_text(draft, prompt_ids, text, sampling, num_positions)
        confidences = tuple(tuple(round(float(c), 4) for c in row) for row in found.confidences)
        trace = RecordedTrace(text, tuple(found.runs.tolist()), confidences)
        sessions.append(RecordedSession(prompt_ids, sampling, text[0], (), trace))
        on_session(number)
    return Recording(model.target_fingerprint, model.dtype, tuple(sessions))


async def _decode(
    address: str, asked: Sequence[tuple[TokenIds, SamplingParams]], num_new: int
) -> list[TokenIds]:
    connection = await connect(address)
    streams = [CloudStream(connection, prompt_ids, sampling) for prompt_ids, sampling in asked]
    await asyncio.gather(*(stream.run(num_new) for stream in streams))
    connection.close()
    return [tuple(stream.token_ids) for stream in streams]


def record_embedded(
    address: str, *, num_sessions: int = 32, num_rounds: int = 24, num_positions: int = 0
) -> Recording:
    """Records the embedded draft and prompts against the verifier at `address`: rounds, or traces of
    `num_positions`; shows progress."""
    from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
    from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
    from outrider.models import EMBEDDED

    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    prompts = [tuple(tokenizer.encode(prompt.text)) for prompt in load_prompts()]

    def show(number: int) -> None:
        if (number + 1) % 8 == 0 or number + 1 == num_sessions:
            print(f"  recording: session {number + 1} of {num_sessions}", file=sys.stderr, flush=True)

    with OnnxDraftModel.open(EMBEDDED / "draft") as draft:
        if num_positions:
            return record_traces(
                address,
                draft,
                prompts,
                num_sessions=num_sessions,
                num_positions=num_positions,
                on_session=show,
            )
        return record(
            address, draft, prompts, num_sessions=num_sessions, num_rounds=num_rounds, on_session=show
        )


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.experiments.load.record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--sessions", type=int, default=32, metavar="N")
    parser.add_argument("--rounds", type=int, default=24, metavar="N", help="rounds a session")
    parser.add_argument(
        "--traces", type=int, default=0, metavar="N", help="traces of N positions a session instead"
    )
    parser.add_argument("--verifier", metavar="HOST:PORT", help="a running one; default: start one")
    parser.add_argument("--stub", action="store_true", help="what a synthetic target answers; needs no model")
    arguments = parser.parse_args()
    if arguments.stub:
        from outrider.experiments.load.record import synthetic_recording

        recording = synthetic_recording(arguments.sessions, arguments.rounds)
    else:
        from outrider.experiments.shared.processes import running_verifier

        with contextlib.ExitStack() as stack:
            address = arguments.verifier
            if not address:
                address = stack.enter_context(running_verifier("--log-level", "warning")).address
            recording = record_embedded(
                address,
                num_sessions=arguments.sessions,
                num_rounds=arguments.rounds,
                num_positions=arguments.traces,
            )
    recording.save(arguments.out)
    print(f"{len(recording.sessions)} sessions written to {arguments.out}")
    return 0


if __name__ == "__main__":
    run_command("load.record", main)
