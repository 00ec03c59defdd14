"""A datastore of 10 M ids of other people's Python: what building and looking up take, and what it brings."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.results_file import Found
from benchmarks.sources.playing import best, draft_model, facts, prompt_ids, tokenizer, union, write
from outrider.edge_client.drafting.copying.contexts import TokenText, longest_match
from outrider.edge_client.drafting.copying.datastore import Datastore
from outrider.edge_client.drafting.copying.retrieval import RetrievalModel
from outrider.experiments.shared.results import Measure, at_least, at_most, judged

NUM_TOKENS, NUM_LOOK_UPS = 10_000_000, 4000
BYTES_A_TOKEN = 3.4  # of Python in the embedded tokenizer, a little less than it has
KINDS = {"code": ("embedded", "humaneval"), "arithmetic": ("gsm8k",), "conversation": ("mt_bench",)}
NUM_PROMPTS, NUM_NEW = 16, 160
_BUILD = """
import resource, sys
from outrider.edge_client.commands.cli import main
status = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(status)
"""


def run() -> Found:
    """Returns the measures."""
    with TemporaryDirectory() as folder:
        files = _files(int(NUM_TOKENS * BYTES_A_TOKEN))
        out = Path(folder) / "store"
        start_s = time.monotonic()
        command = [sys.executable, "-c", _BUILD, "draft", "datastore", "build", *map(str, files), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        minutes, peak_gb = (time.monotonic() - start_s) / 60, int(done.stdout.split()[-1]) / 2**20
        store = Datastore(out, facts().fingerprint)
        microseconds = _look_ups(store)
        gains, details = _gains(RetrievalModel(facts(), store))
        num_tokens, size_mb = store.num_tokens, out.stat().st_size / 1e6
    median, slow = statistics.median(microseconds), statistics.quantiles(microseconds, n=100)[-1]
    told = f"{num_tokens / 1e6:.1f} M ids, {size_mb:.0f} MB"
    every = ", ".join(f"{name} {gain:.3f}" for name, gain in gains.items())
    gain = f"tokens a round, best tree, model+retrieval : draft alone, T = .8, code (by kind: {every})"
    return [
        judged(
            "src.rest_lookup",
            f"a look-up, median; 99 of 100 within {slow:.0f} µs ({told})",
            median,
            "µs",
            at_most(300),
        ),
        judged(
            "src.rest_build", f"building it of {len(files)} files on one core", minutes, "minutes", at_most(5)
        ),
        judged("src.rest_memory", "peak memory of the build", peak_gb, "GiB", at_most(1)),
        judged("src.rest_gain", gain, gains["code"], "ratio", at_least(1.03)),
        Measure("src.rest_gain_worst", "the same, worst kind", min(gains.values()), "ratio"),
    ], details | {"look_up_us": {"median": median, "p99": slow}, "num_tokens": num_tokens}


def _files(num_bytes: int) -> list[Path]:
    """Returns installed Python files of so many bytes, in an order by chance."""
    paths = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    random.Random(1).shuffle(paths)
    chosen: list[Path] = []
    for path in paths:
        if num_bytes <= 0:
            break
        try:
            path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        chosen.append(path)
        num_bytes -= path.stat().st_size
    return chosen


def _look_ups(store: Datastore) -> list[float]:
    """Returns microseconds of look-ups after the places of texts that the datastore lacks."""
    texts = [tokenizer().encode(path.read_text("utf-8")) for path in Path(__file__).parents[1].rglob("*.py")]
    ids = [each for text in texts for each in text]
    choice, found = random.Random(2), list[float]()
    for _ in range(NUM_LOOK_UPS):
        end = choice.randrange(64, len(ids))
        own = TokenText()
        own.extend(ids[end - 64 : end])
        start_s = time.perf_counter()
        longest_match([store.contexts], own.context_after(()), 64)
        found.append(1e6 * (time.perf_counter() - start_s))
    return found


def _gains(model: RetrievalModel) -> tuple[dict[str, float], dict[str, Any]]:
    gains, details = {}, {}
    for kind, sets in KINDS.items():
        texts = [text for name in sets for text in write(prompt_ids(name, NUM_PROMPTS), 0.8, NUM_NEW)]
        (alone, figures), (joined, union_figures) = (
            _best(each, texts) for each in (draft_model(), union(model))
        )
        gains[kind] = joined / alone
        details[kind] = {"draft": figures, "model+retrieval": union_figures}
        print(f"  {kind}: {gains[kind]:.3f}", flush=True)
    return gains, details


def _best(model: Any, texts: Sequence[Any]) -> tuple[float, dict[str, Any]]:
    return best(model, texts)
