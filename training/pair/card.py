"""The model card of a pair, written from the figures beside it: nothing in it is typed by hand.

python -m outrider.training.pair.card --pair models/embedded
"""

import argparse
import json
from pathlib import Path


def write_card(pair: Path) -> None:
    """Write `README.md` of the pair from `corpus.json`, `training-*.json` and `evaluation.json`."""
    from jinja2 import Environment, PackageLoader

    read = {path.stem.removeprefix("training-"): json.loads(path.read_text()) for path in pair.glob("*.json")}
    if missing := {"corpus", "target", "draft", "evaluation"} - read.keys():
        names = {name if name in ("corpus", "evaluation") else f"training-{name}" for name in missing}
        raise FileNotFoundError(f"{pair} lacks {', '.join(sorted(name + '.json' for name in names))}")
    environment = Environment(
        loader=PackageLoader("outrider.training.pair", ""),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    directories = {"target": pair / "target", "draft": pair / "draft", "pair": pair}
    megabytes = {
        name: sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 1e6
        for name, directory in directories.items()
    }
    card = environment.get_template("card.md.j2").render(read, megabytes=megabytes)
    (pair / "README.md").write_text(card)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.pair.card", description="Write the model card of a pair."
    )
    parser.add_argument("--pair", type=Path, default=Path("models/embedded"))
    write_card(parser.parse_args().pair)


if __name__ == "__main__":
    main()
