"""Measure a pair: held-out loss of both, agreement, overlap, acceptance per position, and loops in the
target's text.

    python -m outrider.training.judge.evaluate --pair models/embedded --data DIR --out models/embedded/evaluation.json

The draft is the exported INT4 graph in onnxruntime; the target runs in float32 from its saved weights.
"""

import argparse
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.edge_client.drafting.onnx.model import import_onnxruntime
from outrider.edge_client.drafting.onnx.runner import OnnxRunner
from outrider.edge_client.drafting.spec import GRAPH_FILE, read_spec
from outrider.experiments.shared.prompts import load_prompts
from outrider.training.common.checkpoint import write_json
from outrider.training.common.metrics import acceptance, overlap, repeated_share, softmax
from outrider.training.data.streams import Tokens, load_held_out, windows
from outrider.training.data.tokenizer import load_tokenizer
from outrider.training.draft.sampling import continue_one


class OnnxDraft:
    """Runs `draft.onnx` after each token of a given text. One thread, as on the edge."""

    def __init__(self, directory: Path) -> None:
        """Raises `ModelError` naming what is wrong with the directory."""
        onnxruntime = import_onnxruntime()
        self._spec = read_spec(directory)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(directory / GRAPH_FILE), options, providers=["CPUExecutionProvider"]
        )

    def logits(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Returns [num_tokens, vocab] logits of [num_tokens] ids, row t after token t."""
        runner = OnnxRunner(self._session, self._spec, temperature=0.0)
        rows = [runner.feed([int(id_)], position).logits[0].copy() for position, id_ in enumerate(token_ids)]
        return np.stack(rows)


@dataclass(frozen=True)
class EvaluationConfig:
    """Says how much is measured. Figures of different configs are not comparable."""

    window: int = 1024
    max_tokens_per_file: int = 4096
    new_tokens: int = 128
    loop_tokens: int = 256
    draft_lengths: tuple[int, ...] = (2, 4, 8)
    temperature: float = 0.8
    seed: int = 0
    num_threads: int = 2


class Evaluator:
    """Holds both models of a pair, loaded once."""

    def __init__(self, pair: Path, config: EvaluationConfig) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(config.num_threads)
        self.config = config
        self.target = AutoModelForCausalLM.from_pretrained(str(pair / "target"), dtype=torch.float32).eval()
        self.draft = OnnxDraft(pair / "draft")
        self.tokenizer = load_tokenizer(pair / "target")

    @torch.no_grad()
    def target_logits(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Returns [num_tokens, vocab] logits of [num_tokens] ids."""
        logits: npt.NDArray[np.float32] = (
            self.target(input_ids=torch.from_numpy(token_ids)[None]).logits[0].numpy()
        )
        return logits

    def held_out(self, files: dict[str, Tokens], texts_bytes: dict[str, float]) -> dict[str, Any]:
        """Returns teacher-forced figures over the held-out files. `texts_bytes` is bytes per token of each
        file."""
        sums = {
            "target_nats": 0.0,
            "draft_nats": 0.0,
            "agree": 0.0,
            "overlap": 0.0,
            "tokens": 0.0,
            "bytes": 0.0,
        }
        for name, tokens in files.items():
            for window in windows(tokens[: self.config.max_tokens_per_file + 1], self.config.window):
                target, draft = self.target_logits(window[:-1]), self.draft.logits(window[:-1])
                count = len(window) - 1
                sums["target_nats"] += _nats(target, window[1:])
                sums["draft_nats"] += _nats(draft, window[1:])
                sums["agree"] += float((target.argmax(-1) == draft.argmax(-1)).sum())
                sums["overlap"] += overlap(target, draft, self.config.temperature) * count
                sums["tokens"] += count
                sums["bytes"] += count * texts_bytes[name]
        tokens_seen, bits = sums["tokens"], sums["bytes"] * math.log(2)
        return {
            "num_tokens": int(tokens_seen),
            "target_bits_per_byte": sums["target_nats"] / bits,
            "draft_bits_per_byte": sums["draft_nats"] / bits,
            "target_nats_per_token": sums["target_nats"] / tokens_seen,
            "draft_nats_per_token": sums["draft_nats"] / tokens_seen,
            "argmax_agreement": sums["agree"] / tokens_seen,
            "overlap": sums["overlap"] / tokens_seen,
        }

    def generated(self, prompts: list[str], temperature: float) -> dict[str, Any]:
        """Returns acceptance and loops on the target's own continuations of the prompts, greedy at
        temperature 0."""
        rng = np.random.default_rng(self.config.seed)
        matches, overlaps, repeats, lengths = [], [], [], []
        for prompt in prompts:
            ids = self.tokenizer.encode(prompt).ids
            num_new = self.config.new_tokens if temperature else self.config.loop_tokens
            shape = (num_new, self.target.config.vocab_size)
            noise = rng.gumbel(size=shape).astype(np.float32) if temperature else np.zeros(shape, np.float32)
            new = continue_one(self.target, ids, num_new, temperature, noise if temperature else None)
            repeats.append(repeated_share([new]))
            new = new[: self.config.new_tokens]
            lengths.append(len(new))
            text = np.asarray([*ids, *new[:-1]], dtype=np.int64)
            draft, target = self.draft.logits(text)[-len(new) :], self.target_logits(text)[-len(new) :]
            chosen = (draft / (temperature or 1.0) + noise[: len(new)]).argmax(-1)
            matches.append(chosen == np.asarray(new))
            overlaps.append(overlap(target, draft, temperature or 1.0))
        return {
            "num_prompts": len(prompts),
            "num_tokens": sum(lengths),
            "temperature": temperature,
            "overlap": float(np.average(overlaps, weights=lengths)),
            "repeated_12grams": float(np.mean(repeats)),
            "acceptance": [asdict(acceptance(matches, length)) for length in self.config.draft_lengths],
        }


def _nats(logits: npt.NDArray[np.float32], targets: npt.NDArray[np.int64]) -> float:
    probs = softmax(logits)[np.arange(len(targets)), targets]
    return float(-np.log(np.maximum(probs, 1e-30)).sum())


def evaluate(pair: Path, data: Path, config: EvaluationConfig = EvaluationConfig()) -> dict[str, Any]:
    """Returns all figures of a pair, from its directory and the encoded held-out files."""
    evaluator = Evaluator(pair, config)
    files = load_held_out(data)
    bytes_per_token = {
        name: len(evaluator.tokenizer.decode(tokens[1:].tolist()).encode()) / (len(tokens) - 1)
        for name, tokens in files.items()
    }
    prompts = [item.text for item in load_prompts(pair / "prompts.jsonl")]
    return {
        "config": asdict(config),
        "held_out": evaluator.held_out(files, bytes_per_token),
        "greedy": evaluator.generated(prompts, 0.0),
        "sampled": evaluator.generated(prompts, config.temperature),
    }


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.judge.evaluate", description="Measure a pair."
    )
    parser.add_argument("--pair", type=Path, default=Path("models/embedded"))
    parser.add_argument("--data", type=Path, default=Path("training/runs/pair/data"))
    parser.add_argument("--out", type=Path, default=Path("models/embedded/evaluation.json"))
    args = parser.parse_args()
    figures = evaluate(args.pair, args.data)
    write_json(args.out, figures)
    held_out = figures["held_out"]
    target_bits, draft_bits = held_out["target_bits_per_byte"], held_out["draft_bits_per_byte"]
    print(f"held-out bits per byte: target {target_bits:.3f}, draft {draft_bits:.3f}")
    print(
        f"agreement {held_out['argmax_agreement']:.3f}, overlap {held_out['overlap']:.3f} at temperature 0.8"
    )
    for name in ("greedy", "sampled"):
        part = figures[name]
        rounds = [
            f"{row['tokens_per_round']:.2f} at {row['num_speculative_tokens']}" for row in part["acceptance"]
        ]
        print(
            f"{name}: tokens a round by draft length: {', '.join(rounds)}; "
            f"repeated 12-grams {part['repeated_12grams']:.2f}"
        )


if __name__ == "__main__":
    main()
