"""Compare ways to distil a draft on short runs from one target: divergences, whose text, selection, sizes.

    python -m outrider.training.judge.compare --tokens 100000 [--only fkl rkl ...]

Every variant starts anew, with the same seed, batches and number of tokens, and is judged by its INT4 graph
on texts the target wrote (`judge.yardstick`). Variants that are done are kept in `--out`; the same command
goes on with the others. A short run says which choice learns faster, not which is best in the end.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.training.common.checkpoint import variant_directory, write_json
from outrider.training.common.options import add_run_options, run_options
from outrider.training.common.runtime import describe_machine, keep_freed_memory
from outrider.training.common.schedule import Phase
from outrider.training.data.streams import Batches, Tokens, load_train
from outrider.training.draft.distiller import DistillConfig, Distiller
from outrider.training.draft.drafts import draft_shape, read_config
from outrider.training.judge.yardstick import Costs, Yardstick

_BASE = "fkl"


@dataclass(frozen=True)
class Variant:
    """What differs from the base: fields of `DistillConfig`, the draft's size, a reference variant."""

    changes: dict[str, Any] = field(default_factory=dict)
    size: str = "192x2"
    reference: str | None = None


VARIANTS = {
    _BASE: Variant(),
    "rkl": Variant({"divergence": "rkl"}),
    "js": Variant({"divergence": "js"}),
    "tvd": Variant({"divergence": "tvd"}),
    "corpus only": Variant({"target_share": 0.0}),
    "70 % target text": Variant({"target_share": 0.7}),
    "target text only": Variant({"target_share": 1.0}),
    "on-policy 30 %": Variant({"target_share": 0.25, "draft_share": 0.3}),
    "easiest 40 %": Variant({"easy_share": 0.4}, reference=_BASE),
    "easiest 70 %": Variant({"easy_share": 0.7}, reference=_BASE),
    "not INT4-aware": Variant({"quantize_start": 1.0}),
    "64x1": Variant(size="64x1"),
    "96x2": Variant(size="96x2"),
    "256x3": Variant(size="256x3"),
}
"""From 0.6 M (64x1) to 3.9 M parameters (256x3); the base is 2.4 M."""


class _RememberingDistiller(Distiller):
    """Computes the target's hidden states once for all variants that see the same batches."""

    known: dict[bytes, Tensor]

    def _target_hidden(self, inputs: Tensor) -> Tensor:
        key = inputs.cpu().numpy().tobytes()
        if key not in self.known:
            self.known[key] = super()._target_hidden(inputs)
        return self.known[key]


class Comparison:
    """One target, its corpus and its text; variants run one after another."""

    def __init__(self, base: DistillConfig, target: Path, stream: Tokens, out: Path) -> None:
        self._base, self._target, self._stream, self._out = base, target, stream, out
        self._fields = read_config(target)
        self._known: dict[bytes, Tensor] = {}

    def run(self, name: str) -> Path:
        """Train a variant, unless it is there, and return its directory."""
        variant, out = VARIANTS[name], variant_directory(self._out, name)
        if (out / "training.json").is_file():
            return out
        reference = self.run(variant.reference) if variant.reference else None
        shape = draft_shape(variant.size, self._fields["vocab_size"], self._fields["max_position_embeddings"])
        config = replace(self._base, model=shape, **variant.changes)
        distiller = _RememberingDistiller(config, self._target, self._stream, out, reference_dir=reference)
        distiller.known = self._known
        self._share_text(distiller)
        distiller.resume()
        distiller.train()
        (out / "checkpoint.pt").unlink()
        return out

    def _share_text(self, distiller: Distiller) -> None:
        """The target's text is sampled by the first variant that needs it, and kept for the others."""
        path = self._out / "target_text.pt"
        if path.is_file():
            distiller.target_rows = torch.load(path, weights_only=True)
            return
        while distiller.needs_target_text():
            distiller.sample_target_text()
            print(f"target's text: {sum(rows.numel() for rows in distiller.target_rows)} tokens", flush=True)
        distiller.corpus = Batches(self._stream, seed=self._base.seed, epoch=1)  # as the others find it
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(distiller.target_rows, path)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown, one variant a line."""
    lines = [
        "| variant | parameters | Σ min(p, q) | argmax agreement | tokens a round, n = 4 | ms a draft token "
        "| tokens/s, loopback | tokens/s, RTT 50 ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        near, far = row["loopback"], row["rtt_50ms"]
        lines.append(
            f"| {name} | {row['num_parameters'] / 1e6:.1f} M | {row['overlap']:.3f} | {row['agreement']:.3f} "
            f"| {row['tokens_per_round_4']:.2f} | {row['draft_token_ms']:.2f} "
            f"| {near['tokens_per_s']:.0f} (n = {near['num_draft_tokens']}) "
            f"| {far['tokens_per_s']:.1f} (n = {far['num_draft_tokens']}) |"
        )
    return "\n".join(lines)


def parse_args(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.judge.compare", description="Compare drafts."
    )
    parser.add_argument("--target", type=Path, default=Path("models/embedded/target"))
    parser.add_argument("--prompts", type=Path, default=Path("models/embedded/prompts.jsonl"))
    parser.add_argument("--data", type=Path, default=Path("training/runs/pair/data"))
    parser.add_argument("--out", type=Path, default=Path("training/runs/compare"))
    parser.add_argument("--costs", type=Path, default=Path("benchmarks/results/main.json"))
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--drafts", type=Path, nargs="*", default=[], help="finished drafts to judge as well")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--num-new", type=int, default=96, help="tokens of each text")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    add_run_options(parser)
    return parser.parse_args(arguments)


def main() -> None:
    """Command line."""
    args = parse_args(sys.argv[1:])
    if args.workers > 1:
        sys.exit("error: --workers: variants run in one process, so that they share the target's answers")
    keep_freed_memory()
    base = DistillConfig(phases=(Phase(0.0, 256, args.batch_tokens // 256),), tokens=100_000)
    base = replace(base, **run_options(args))
    try:
        comparison = Comparison(base, args.target, load_train(args.data), args.out)
        yardstick = Yardstick(
            args.target, args.prompts, Costs.read(args.costs), args.num_prompts, args.num_new
        )
        results = {str(path): yardstick.measure(path) for path in args.drafts}
        for name in args.only:
            started = time.monotonic()
            directory = comparison.run(name)
            results[name] = yardstick.measure(directory)
            print(f"{name}: {results[name]['overlap']:.3f}, {time.monotonic() - started:.0f} s", flush=True)
            write_json(
                args.out / "compare.json",
                {
                    "command": " ".join(["python -m outrider.training.judge.compare", *sys.argv[1:]]),
                    "machine": describe_machine(args.device),
                    "tokens": json.loads((directory / "training.json").read_text())["tokens"],
                    "variants": results,
                },
            )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on")
    print(table(results))


if __name__ == "__main__":
    main()
