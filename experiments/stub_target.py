"""A verifier whose forward costs nothing: `python -m experiments.stub_target --listen 127.0.0.1:0`.

The product's own server, engine and codec around a target whose logits are one fixed row over 256 tokens, so
that what is left is everything but the model. Greedily its text is one token repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cloud_verifier.backends.base import ForwardItem, KVSequence, Logits
from cloud_verifier.config import ServeConfig
from cloud_verifier.kv.blocks import BlockUsage
from cloud_verifier.server import VerifierServer, run_until_signalled
from common.types import SamplingParams
from experiments.command import run_command
from experiments.load_recording import RecordedRound, RecordedSession, Recording

VOCAB_SIZE = 256
FAVOURITE = 7  # the token every row prefers
MAX_ROWS = 4096
FINGERPRINT = "stub"
DRAFTS_A_ROUND = 4
PROMPT_TOKENS = 64


@dataclass(eq=False, slots=True)
class StubSequence:
    length: int = 0
    num_reused: int = 0


class StubBackend:
    """Implements `TargetBackend`: lengths instead of KV, a view of one array instead of a forward."""

    num_tokens = VOCAB_SIZE
    vocab_size = VOCAB_SIZE
    max_context = 1 << 20
    dtype = "float32"
    device = "cpu"
    model_id = "stub"
    fingerprint = FINGERPRINT
    tokenizer_fingerprint = FINGERPRINT
    eos_token_ids: tuple[int, ...] = (0,)

    def __init__(self) -> None:
        self.num_forwards = 0
        self.num_query_rows = 0
        row = np.linspace(-1.0, 1.0, VOCAB_SIZE, dtype=np.float32)
        row[FAVOURITE] = 5.0
        self._rows = np.tile(row, (MAX_ROWS, 1))

    @property
    def num_free_tokens(self) -> int:
        return 1 << 30

    @property
    def kv_usage(self) -> BlockUsage:
        return BlockUsage(block_size=1, num_used=0, num_cached=0, num_empty=1 << 30, num_evicted=0)

    def new_sequence(self, tenant: str = "", token_ids: Sequence[int] = ()) -> StubSequence:
        return StubSequence()

    def publish(self, sequence: KVSequence, token_ids: Sequence[int]) -> None:
        """Nothing is worth finding again."""

    def forward(self, items: Sequence[ForwardItem]) -> Logits:
        num_rows = 0
        for item in items:
            assert isinstance(item.sequence, StubSequence)
            item.sequence.length += len(item.token_ids)
            self.num_query_rows += len(item.token_ids)
            num_rows += item.num_logit_rows
        self.num_forwards += 1
        return self._rows[:num_rows]

    def truncate(self, sequence: KVSequence, length: int) -> None:
        assert isinstance(sequence, StubSequence)
        sequence.length = length

    def fork(self, sequence: KVSequence) -> StubSequence:
        return StubSequence(sequence.length)

    def close(self, sequence: KVSequence) -> None:
        """Lengths need no freeing."""

    def check_integrity(self) -> None:
        """There is no bookkeeping."""


def stub_recording(num_sessions: int = 32, num_rounds: int = 24) -> Recording:
    """What the stub answers at temperature 0: drafts of its favourite token stand, and the bonus is it."""
    round_ = RecordedRound((FAVOURITE,) * DRAFTS_A_ROUND, (0.9,) * DRAFTS_A_ROUND, DRAFTS_A_ROUND, FAVOURITE)
    sessions = (
        RecordedSession(
            prompt_ids=tuple((number + i) % VOCAB_SIZE for i in range(PROMPT_TOKENS)),
            sampling=SamplingParams(temperature=0.0, seed=number),
            first_token=FAVOURITE,
            rounds=(round_,) * num_rounds,
        )
        for number in range(num_sessions)
    )
    return Recording(FINGERPRINT, StubBackend.dtype, tuple(sessions))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.stub_target", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    listen = parser.parse_args().listen
    server = VerifierServer(StubBackend(), ServeConfig(listen=listen, admin_listen="none"))

    def announce(server: VerifierServer) -> None:
        print(f"stub verifier, serving fixed logits on {listen.rpartition(':')[0]}:{server.port}", flush=True)

    run_until_signalled(server, announce)
    return 0


if __name__ == "__main__":
    run_command("stub_target", main)
