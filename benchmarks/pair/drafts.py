"""The trained draft against drafts without training: prompt lookup, and the target's own first layers."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.sessions import Sessions, warn_of_other_texts
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.registry import create_draft_model
from outrider.edge_client.session.session import SessionResult
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.prompts import Prompt

TRAINED, LOOKUP = "trained", "prompt lookup"
DRAFT_LENGTH = 4  # of the figures that are compared


@contextlib.contextmanager
def open_strategies(
    pair: Path, scratch: Path, first_layers: Sequence[int]
) -> Iterator[dict[str, DraftModel]]:
    """Opens by name: the pair's draft, prompt lookup, and INT4 drafts of the target's first layers."""
    with contextlib.ExitStack() as stack:
        strategies = {
            TRAINED: stack.enter_context(create_draft_model("model", pair / "draft")),
            LOOKUP: stack.enter_context(create_draft_model("prompt-lookup", pair / "draft")),
        }
        for number in first_layers:
            report = export_draft(pair / "target", scratch / f"first-{number}", first_layers=number)
            total = report.num_source_layers or report.num_layers
            model = stack.enter_context(create_draft_model("model", report.out_dir))
            strategies[f"first {number} of {total} layers"] = model
        yield strategies


def sample_strategies(
    address: str,
    strategies: dict[str, DraftModel],
    tokenizer: EdgeTokenizer,
    prompts: Sequence[Prompt],
    temperature: float,
    num_new: int,
) -> tuple[dict[str, Sessions], list[SessionResult]]:
    """Runs every strategy on every prompt, taking turns, and the target alone; to the end of each text."""
    decoders = {name: Decoder(address, model, tokenizer) for name, model in strategies.items()}
    found = {name: Sessions() for name in strategies}
    alone = []
    cloud_only = Case(ExecutionMode.CLOUD_ONLY, temperature)
    speculative = Case(ExecutionMode.SPECULATIVE, temperature, DRAFT_LENGTH)
    for number, prompt in enumerate(prompts):
        print(f"\rdrafts: prompt {number + 1} of {len(prompts)}", end="", flush=True)
        alone.append(decoders[TRAINED].decode(prompt.text, cloud_only, num_new, ignore_eos=False))
        for name, decoder in decoders.items():
            found[name].results.append(decoder.decode(prompt.text, speculative, num_new, ignore_eos=False))
    print()
    for name, sessions in found.items():
        warn_of_other_texts(name, sessions.results, alone)
    return found, alone


def strategy_figures(sessions: Sessions) -> dict[str, float]:
    """Returns one strategy's figures."""
    drafted = [r for r in sessions.rounds if r.num_draft_tokens]
    return {
        "tokens_per_round": round(sessions.tokens_per_round, 3),
        "acceptance_rate": round(sessions.acceptance_rate, 4),
        "drafted_per_round": round(statistics.fmean(r.num_draft_tokens for r in sessions.rounds), 2),
        "draft_ms_per_token": round(statistics.median(r.draft_ms / r.num_draft_tokens for r in drafted), 4),
    }
