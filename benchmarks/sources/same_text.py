"""Every source and union in real processes: texts unlike cloud-only's. `faults` plays them with faults."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.results_file import ROOT, Found
from benchmarks.sources.playing import tokenizer
from benchmarks.trees.links import CLOUD_ONLY, Settings, play
from outrider.edge_client.drafting.copying.datastore import build_datastore
from outrider.edge_client.drafting.registry import MODEL, STRATEGIES
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import at_most, judged

NUM_PROMPTS, NUM_NEW = 3, 48
TEMPERATURES = (0.0, 0.8)
SOURCES = tuple(each for each in STRATEGIES if each != MODEL)
WAYS: dict[str, Settings] = {
    "chains": {"tree": "off", "num_speculative_tokens": 6, "pipeline": "off"},
    "pipelined": {"tree": "off", "num_speculative_tokens": 6, "pipeline": "on"},
    "trees": {"tree": 16, "pipeline": "off"},
    "pipelined trees": {"tree": 16, "pipeline": "on"},
}
EVERY = f"{', '.join(SOURCES)}; {', '.join(WAYS)}; T = 0, .8"


def run() -> Found:
    """Returns the measure; each prompt is asked twice, so that there is something to copy."""
    prompts = load_prompts()[:NUM_PROMPTS] * 2
    details: dict[str, Any] = {}
    num_texts = num_other = 0
    with TemporaryDirectory() as folder:
        store = write_datastore(Path(folder))
        for temperature in TEMPERATURES:
            cases = {"cloud-only": dict(CLOUD_ONLY["cloud-only"]) | {"temperature": temperature}}
            for strategy in SOURCES:
                for way, settings in WAYS.items():
                    own = {"draft_strategy": strategy, "mode": "speculative", "temperature": temperature}
                    cases[f"{strategy}, {way}"] = {**own, **settings, "datastore": store}
            turns = play(prompts, 0.0, 0.0, cases, num_new=NUM_NEW)
            num_texts += len(prompts) * (len(cases) - 1)
            num_other += turns.num_other_texts
            details[f"T={temperature:g}"] = {name: round(turns.median(name), 2) for name in cases}
    what = f"texts unlike cloud-only's of {num_texts}: {EVERY}"
    return [judged("src.same_text", what, num_other, "texts", at_most(0))], details


def write_datastore(folder: Path) -> Path:
    """Writes a datastore of this project's files into a folder; returns its path."""
    files = sorted((ROOT / "common").rglob("*.py"))
    encode = tokenizer().encode
    build_datastore(
        files, folder / "store", lambda text: encode(text, is_complete=True), tokenizer().fingerprint
    )
    return folder / "store"
