"""The model card of a pair, written from the figures beside it: nothing in it is typed by hand.

python -m outrider.training.pair.card --pair models/embedded
"""

import argparse
import json
from pathlib import Path
from typing import Any

# ruff: noqa: E501 -- tables and prose of the card are as long as they are
_INTRODUCTION = """# The embedded pair

A small target and a smaller draft that share one tokenizer, for demos, tests and benchmarks of distributed
speculative decoding on any machine. They write Python-like text. They know nothing else, and are of no use as
programming assistants: this card says how little they were trained.

| | architecture | parameters | file | form |
|---|---|---|---|---|
"""

_DIVERGENCES = {
    "fkl": "forward KL",
    "rkl": "reverse KL",
    "js": "Jensen-Shannon divergence",
    "tvd": "total variation",
}

_LIMITS = """
## Limits

- The target saw {seen:.1f} M tokens. Its text has the look of Python and little sense. Of a greedy text's runs of
  12 tokens {repeated:.0%} are repeats, as a mean over texts; taken together, as `pair.loops` does, long loops
  count for more (read greedy figures with that: a loop makes any draft look good).
- Agreement and acceptance are those of a weak target: an undertrained model has a smooth distribution that a
  draft imitates easily. They say nothing about pairs of strong models.
- Positions beyond the longest training window ({longest} tokens) were never trained, though the configuration
  allows {context}.
- English and other languages' code are out of its domain, and the tokenizer spends many tokens on them.
- Both models may reproduce short passages of the source text listed above.
"""


def write_card(pair: Path) -> None:
    """Write `README.md` of the pair from `corpus.json`, `training-*.json` and `evaluation.json`."""
    read = {path.stem: json.loads(path.read_text()) for path in pair.glob("*.json")}
    missing = {"corpus", "training-target", "training-draft", "evaluation"} - read.keys()
    if missing:
        raise FileNotFoundError(f"{pair} lacks {', '.join(sorted(name + '.json' for name in missing))}")
    target, polish, draft = read["training-target"], read.get("training-polish"), read["training-draft"]
    parts = [
        _INTRODUCTION + _models(pair, target, draft),
        _data(read["corpus"]),
        _recipe(target, polish, draft),
        _figures(read["evaluation"]),
        _LIMITS.format(
            seen=_tokens_seen(polish or target) / 1e6,
            repeated=read["evaluation"]["greedy"]["repeated_12grams"],
            longest=_longest(target),
            context=target["config"]["model"]["context"],
        ),
    ]
    (pair / "README.md").write_text("\n".join(parts))


def _models(pair: Path, target: dict[str, Any], draft: dict[str, Any]) -> str:
    rows = []
    forms = {"target": "bf16 safetensors", "draft": "INT4 ONNX, blocks of 32"}
    for name, figures in (("target", target), ("draft", draft)):
        model = figures["config"]["model"]
        shape = (
            f"Llama, {model['num_layers']} layers of {model['hidden_size']}, {model['num_heads']} heads "
            f"({model['num_kv_heads']} for keys and values) of {model['head_dim']}, FFN {model['ffn_size']}, "
            f"embeddings {'tied' if model['tied'] else 'apart'}"
        )
        size = sum(path.stat().st_size for path in (pair / name).iterdir()) / 1e6
        rows.append(
            f"| {name} | {shape} | {figures['num_params'] / 1e6:.1f} M | {size:.1f} MB | {forms[name]} |"
        )
    total = sum(path.stat().st_size for path in pair.rglob("*") if path.is_file()) / 1e6
    text = f"Together {total:.1f} MB. Byte-level BPE of 8,192 ids, `<|endoftext|>` between documents."
    return "\n".join([*rows, "", text, ""])


def _data(corpus: dict[str, Any]) -> str:
    lines = [
        "## Data",
        "",
        f"Python source of the standard library and of installed packages: {corpus['num_bytes'] / 1e6:.1f} MB in",
        f"{corpus['num_documents']:,} documents after filtering and removal of duplicates (`training/data/corpus.py`;",
        "what was dropped and why is counted in `corpus.json`). The text itself is not part of this repository.",
        "",
        "| source | version | files | MB | licence |",
        "|---|---|---|---|---|",
    ]
    for name, item in corpus["sources"].items():
        distribution = item["distribution"]
        label = distribution if distribution.lower() == name else f"{distribution} ({name})"
        size = f"{item['bytes'] / 1e6:.2f}"
        lines.append(f"| {label} | {item['version']} | {item['files']} | {size} | {item['licence']} |")
    names = ", ".join(f"`{name}`" for name in corpus["held_out"])
    return "\n".join(
        [
            *lines,
            "",
            f"Held out, never trained on, near-duplicates removed (`training/data/heldout.py`): {names}.",
            "",
            "`prompts.jsonl`: heads of held-out functions with their docstrings (`python -m outrider.training.data.prompts`).",
            "",
        ]
    )


def _recipe(target: dict[str, Any], polish: dict[str, Any] | None, draft: dict[str, Any]) -> str:
    config = draft["config"]
    phases = "; ".join(
        f"from {phase['start']:.0%} windows of {phase['length']}, {phase['num_layers']} layers"
        + (f", {phase['functions']:.0%} of the batches whole functions" if phase.get("functions") else "")
        for phase in target["config"]["phases"]
    )
    start = target["config"].get("unlikelihood", {}).get("start", 1.0)
    repeats = f"Unlikelihood of repeats in its own greedy text from {start:.0%} on.\n  " if start < 1 else ""
    # The record of the first pair was written before there was a choice, and names one share differently.
    divergence = _DIVERGENCES[config.get("divergence", "fkl")]
    target_share = config.get("target_share", config.get("sampled_share", 0.0))
    return f"""## Recipe

`make pair` on {target["machine"]}. Seeded, but not bit-reproducible: how work is
shared out, and a schedule that follows the clock, change the last bits. The loss curves are in `training-*.json`.

- **Target**: {_spent(target)}.{_before_it(target)}
  Muon and AdamW in float32; warm-up, plateau, linear decay. Shares of the budget:
  {phases}.
  {repeats}{_kept(target)}
{_polish(polish) if polish else ""}- **Draft**: {divergence} from the target, {_spent(draft)}.{_before_it(draft)}
  {target_share:.0%} of the batches are drawn from {draft["sampled_tokens"] / 1e3:.0f} k
  tokens that the target wrote at temperature {config["sample_temperature"]}, {config.get("draft_share", 0.0):.0%} from text of the draft
  itself. INT4-aware from {config["quantize_start"]:.0%} of the budget on. Last loss {draft["loss"]:.3f}.
"""


def _figures(evaluation: dict[str, Any]) -> str:
    held_out, config, sampled = evaluation["held_out"], evaluation["config"], evaluation["sampled"]
    rows = [
        ("target, bits per byte", held_out["target_bits_per_byte"]),
        ("target, nats per token", held_out["target_nats_per_token"]),
        ("draft, bits per byte", held_out["draft_bits_per_byte"]),
        ("draft, nats per token", held_out["draft_nats_per_token"]),
        ("argmax agreement", held_out["argmax_agreement"]),
        (f"mean Σ min(p, q), temperature {config['temperature']}", held_out["overlap"]),
    ]
    lines = [
        "## Figures",
        "",
        "Measured by `python -m outrider.training.judge.evaluate`: the INT4 draft in onnxruntime, the target in float32.",
        "",
        f"| on held-out files, teacher-forced, {held_out['num_tokens']:,} tokens | |",
        "|---|---|",
        *(f"| {name} | {value:.3f} |" for name, value in rows),
        "",
        "On the target's own continuations of the prompts, coupled verification; acceptance per position is the",
        "share of rounds accepted up to and including that position:",
        "",
        "| temperature | draft length | accepted / drafted | tokens a round | per position | repeated 12-grams |",
        "|---|---|---|---|---|---|",
        *_acceptance_rows(evaluation["greedy"]),
        *_acceptance_rows(sampled),
        "",
        f"{sampled['num_prompts']} prompts, at most {config['new_tokens']} new tokens each; repeated 12-grams are",
        f"counted over at most {config['loop_tokens']} tokens when greedy. Σ min(p, q) on the sampled text is",
        f"{sampled['overlap']:.3f}.",
    ]
    return "\n".join(lines) + "\n"


def _acceptance_rows(part: dict[str, Any]) -> list[str]:
    rows = []
    for item in part["acceptance"]:
        positions = " ".join(f"{share:.2f}" for share in item["per_position"])
        rates = f"{item['acceptance_rate']:.3f} | {item['tokens_per_round']:.2f}"
        length, repeated = item["num_speculative_tokens"], part["repeated_12grams"]
        rows.append(f"| {part['temperature']} | {length} | {rates} | {positions} | {repeated:.2f} |")
    return rows


def _polish(run: dict[str, Any]) -> str:
    own = run["own_functions"]
    return f"""- **Polish** of the target (`training/target/polish.py`): {_spent(run)},
  {run["config"]["phases"][0]["functions"]:.0%} of the batches from functions that it wrote itself: the {own["kept"]:,} of {own["written"]:,} that parse and
  repeat nothing. {_kept(run)}
"""


def _kept(run: dict[str, Any]) -> str:
    validation = run["validation_loss"]
    return f"""Validation loss {validation["last"]:.3f} nats a token, {validation["average"]:.3f} with averaged weights; the
  {run["kept"]} weights were kept."""


def _tokens_seen(target: dict[str, Any]) -> int:
    tokens: int = target["tokens"] + sum(run["tokens"] for run in _before(target))
    return tokens


def _spent(run: dict[str, Any]) -> str:
    return f"{run['tokens'] / 1e6:.2f} M tokens in {run['steps']} steps and {run['minutes']} minutes"


def _before_it(run: dict[str, Any]) -> str:
    return " Before it: " + ", then ".join(map(_spent, _before(run))) + "." if _before(run) else ""


def _before(run: dict[str, Any]) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = run.get("before", [])
    return runs


def _longest(target: dict[str, Any]) -> int:
    return max(int(phase["length"]) for phase in target["config"]["phases"])


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.pair.card", description="Write the model card of a pair."
    )
    parser.add_argument("--pair", type=Path, default=Path("models/embedded"))
    write_card(parser.parse_args().pair)


if __name__ == "__main__":
    main()
