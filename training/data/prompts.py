"""The benchmark prompts: heads of held-out functions with their docstrings, one JSON object `{"id",
"prompt"}` a line.

python -m outrider.training.data.prompts --out models/embedded/prompts.jsonl
"""

import argparse
import json
import sysconfig
from itertools import zip_longest
from pathlib import Path

from outrider.experiments.shared.prompts import Prompt
from outrider.training.data.corpus import read_held_out
from outrider.training.data.functions import documented_functions


def make_prompts(held_out: dict[str, str], count: int = 40) -> list[Prompt]:
    """Take functions from the modules in turn, in file order, until there are `count`."""
    by_module = [_module_prompts(name, text) for name, text in sorted(held_out.items())]
    in_turn = [prompt for group in zip_longest(*by_module) for prompt in group if prompt is not None]
    return in_turn[:count]


def save_prompts(prompts: list[Prompt], path: Path) -> None:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": item.id, "prompt": item.text}) + "\n" for item in prompts))


def _module_prompts(name: str, text: str) -> list[Prompt]:
    stem = name.removesuffix(".py").replace("/", ".")
    return [Prompt(f"{stem}.{function.name}", function.head) for function in documented_functions(text)]


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.data.prompts", description="Make the benchmark prompts."
    )
    parser.add_argument("--out", type=Path, default=Path("models/embedded/prompts.jsonl"))
    parser.add_argument("--count", type=int, default=40)
    args = parser.parse_args()
    paths = sysconfig.get_paths()
    prompts = make_prompts(read_held_out(Path(paths["stdlib"]), Path(paths["purelib"])), args.count)
    save_prompts(prompts, args.out)
    print(f"{len(prompts)} prompts in {args.out}")


if __name__ == "__main__":
    main()
