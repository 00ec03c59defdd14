"""Records what of a real draft would be accepted, at every position of the texts of the embedded prompts.

python -m benchmarks.controller.record_acceptance [--texts 16 --positions 128]

The target writes each text alone; then the draft proposes 64 tokens at every position of it, and as many
count as standing as agree with the text. That is what `coupled` accepts, whose text is the target's own
whatever is drafted. Of the first token its runner-up is noted too: whether that is the text's, and the gap
between the two. Times do not enter: any machine records the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from outrider.common.types import SamplingParams
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.acceptance_traces import (
    MAX_DEPTH,
    RECORDED,
    TraceSet,
    save_traces,
    trace_text,
)
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import load_prompts
from outrider.models import EMBEDDED

TEMPERATURES = (0.8, 0.0)
SEED = 1


def record(address: str, num_texts: int, num_positions: int) -> list[TraceSet]:
    """Records one set a temperature, of the first `num_texts` embedded prompts."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    sets = []
    with OnnxDraftModel.open(EMBEDDED / "draft") as draft:
        decoder = Decoder(address, draft, tokenizer)
        for temperature in TEMPERATURES:
            texts = []
            sampling = SamplingParams(temperature=temperature, seed=SEED)
            for number, prompt in enumerate(load_prompts(limit=num_texts)):
                print(f"\rT={temperature:g}: text {number + 1} of {num_texts}", end="", file=sys.stderr)
                case = Case(ExecutionMode.CLOUD_ONLY, temperature)
                result = decoder.decode(prompt.text, case, num_positions + MAX_DEPTH, SEED)
                ids = tuple(tokenizer.encode(prompt.text))
                texts.append(trace_text(draft, ids, result.token_ids, sampling, num_positions))
            print(file=sys.stderr)
            sets.append(TraceSet(f"embedded T={temperature:g}", "recorded", tuple(texts)))
    return sets


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.controller.record_acceptance", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=RECORDED, metavar="FILE")
    parser.add_argument("--texts", type=int, default=16, metavar="N", help="prompts to write a text after")
    parser.add_argument("--positions", type=int, default=128, metavar="N", help="positions of each text")
    arguments = parser.parse_args()
    with running_verifier("--log-level", "warning") as verifier:
        sets = record(verifier.address, arguments.texts, arguments.positions)
    save_traces(arguments.out, sets)
    for traces in sets:
        print(f"{traces.name}: first token of a draft accepted {traces.acceptance_rate:.3f}")
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    run_command("record_acceptance", main)
