"""How well the draft's signals tell which of its tokens the target will not write.

python -m outrider.experiments.dropout_quality [--texts 12 --positions 50 --rate 0.1 --rate 0.2]

The embedded target writes texts alone; at every position of them the draft proposes one token, which stands
where the text has the same. A signal is as good as the chance that a token that falls looks worse by it than
one that stands (AUC: 0.5 knows nothing). Times do not enter: any machine finds the same.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.controller.record_acceptance import SEED, TEMPERATURES
from outrider.common.types import SamplingParams, TokenIds
from outrider.edge_client.core.options import Mode
from outrider.edge_client.drafting.export.dropout_graph import add_dropout
from outrider.edge_client.drafting.onnx.dropout import DEFAULT_RATE, Candidates
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import load_prompts
from outrider.models import EMBEDDED

Text = tuple[TokenIds, TokenIds]  # prompt, what the target wrote after it
NAMES = ("entropy", "NLL", "margin", "variance", "variance of p")


def judge_texts(
    model: OnnxDraftModel, texts: Sequence[Text], sampling: SamplingParams
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The signals [positions, len(NAMES)], larger where the draft is less sure, and which tokens fell."""
    found = [each for text in texts for each in _judge(model, *text, sampling)]
    return np.array([signals for signals, _ in found]), np.array([has_fallen for _, has_fallen in found])


def _judge(
    model: OnnxDraftModel, prompt_ids: TokenIds, text: TokenIds, sampling: SamplingParams
) -> Iterator[tuple[tuple[float, ...], bool]]:
    sequence = model.sequence(sampling)
    runner, sampler = sequence.parts
    runner.feed(prompt_ids, 0)
    for index, (token_id, following) in enumerate(itertools.pairwise(text), len(prompt_ids)):
        rows = runner.feed([token_id], index)
        drafted, _, signals, _ = sampler.sample(rows, index + 1)
        assert rows.candidates is not None and signals.variance is not None
        told = (signals.entropy_bits, signals.nll, -signals.margin, signals.variance)
        yield (*told, _plain_variance(rows.candidates)), drafted != following
    sequence.close()


def _plain_variance(candidates: Candidates) -> float:
    """Of p itself instead of ln p."""
    weights = np.exp(candidates.logits - candidates.logits.max(axis=1, keepdims=True))
    return float((weights[:, 0] / weights.sum(axis=1)).var(ddof=1))


def auc(signal: NDArray[np.float64], has_fallen: NDArray[np.bool_]) -> float:
    """The chance that the signal is larger of a token that fell than of one that stood."""
    order = signal.argsort(kind="stable")
    ranks = np.empty(len(order))
    ranks[order] = np.arange(len(order))
    num_fallen = int(has_fallen.sum())
    pairs = num_fallen * (len(order) - num_fallen)
    return float((ranks[has_fallen].sum() - num_fallen * (num_fallen - 1) / 2) / pairs)


def write_texts(num_texts: int, num_positions: int) -> dict[float, list[Text]]:
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    texts: dict[float, list[Text]] = {}
    with running_verifier("--log-level", "warning") as verifier:
        with OnnxDraftModel.open(EMBEDDED / "draft") as draft:
            decoder = Decoder(verifier.address, draft, tokenizer)
            for temperature in TEMPERATURES:
                case = Case(Mode.CLOUD_ONLY, temperature)
                texts[temperature] = [
                    (
                        tuple(tokenizer.encode(prompt.text)),
                        decoder.decode(prompt.text, case, num_positions + 1, SEED).token_ids,
                    )
                    for prompt in load_prompts(limit=num_texts)
                ]
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m outrider.experiments.dropout_quality", description=__doc__
    )
    parser.add_argument("--texts", type=int, default=12, metavar="N", help="prompts to write a text after")
    parser.add_argument("--positions", type=int, default=50, metavar="N", help="positions of each text")
    parser.add_argument("--rate", type=float, action="append", metavar="R", help="shares dropped to compare")
    arguments = parser.parse_args()
    texts = write_texts(arguments.texts, arguments.positions)
    print(f"{'':24}{'fell':>8}" + "".join(f"{name:>15}" for name in NAMES))
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(shutil.copytree(EMBEDDED / "draft", Path(scratch) / "draft"))
        for rate in arguments.rate or [DEFAULT_RATE]:
            add_dropout(directory, rate=rate)
            with OnnxDraftModel.open(directory, has_variance=True) as model:
                for temperature, written in texts.items():
                    sampling = SamplingParams(temperature=temperature, seed=SEED)
                    signals, has_fallen = judge_texts(model, written, sampling)
                    cells = "".join(f"{auc(column, has_fallen):15.3f}" for column in signals.T)
                    print(f"{f'T={temperature:g}, rate {rate:g}':24}{has_fallen.mean():8.3f}{cells}")
    return 0


if __name__ == "__main__":
    run_command("dropout_quality", main)
