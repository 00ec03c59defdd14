"""`python -m outrider.experiments.report FOLDER`: draw the report of a results folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from outrider.common.errors import OutriderError
from outrider.experiments.report import render


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m outrider.experiments.report", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="+", help="results folder of `edge-client bench`")
    try:
        for folder in parser.parse_args(arguments).folder:
            print(render(folder))
    except OutriderError as error:
        print(f"outrider.experiments.report: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
