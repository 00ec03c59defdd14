"""`quant.torch_draft`: the draft in PyTorch beside its source in transformers, after rollbacks, and in whole texts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.matrix import best_realisation
from benchmarks.quantised.source import draft_source
from benchmarks.reliability.wire import FAULTS, Fault
from benchmarks.results_file import Found
from outrider.common.tree import Tree
from outrider.common.types import SamplingParams, TokenIds
from outrider.edge_client.controller.window import create_window
from outrider.edge_client.core.events import SessionEvent, TokenEvent
from outrider.edge_client.core.options import ExecutionMode, Pipelining
from outrider.edge_client.drafting.backend import BackendSettings
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.pytorch.check import Distance, check_export
from outrider.edge_client.drafting.pytorch.model import TorchDraftModel, TorchDraftSequence
from outrider.edge_client.drafting.trees import TreeBudget
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.links.base import OpenLink
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import Measure, at_most, judged
from outrider.models import EMBEDDED

WAYS = {
    "float32": BackendSettings("torch", "cpu", "float32"),
    "bfloat16": BackendSettings("torch", "cpu", "bfloat16"),
    "fp8": BackendSettings("torch", "cpu", "fp8"),
    "nf4": BackendSettings("torch", "cpu", "nf4"),
    "fp8 KV": BackendSettings("torch", "cpu", "float32", "fp8"),
}
MAX_DIFFERENCE = 1e-3
NUM_PROMPTS, NUM_NEW = 4, 48
TEXT_TOKENS = 256  # of each prompt's passage, read once at a time and once in chunks
NUM_HISTORIES, NUM_STEPS = 40, 12
TREE = TreeBudget(12, 5, 3)
SAMPLED = SamplingParams(temperature=0.8, seed=5)


def run() -> Found:
    """Returns the measures: probabilities, drafts after rollback, and texts."""
    with draft_source() as source, ExitStack() as stack:
        drafts = {name: stack.enter_context(TorchDraftModel.open(source, way)) for name, way in WAYS.items()}
        texts = _texts(drafts["float32"])
        difference, distances = _compare(source, drafts, texts)
        rolled = {name: _roll_back(draft) for name, draft in drafts.items()}
        different, happened = _write(drafts)
        export = check_export(source, EMBEDDED / "draft")
    wording, is_met = at_most(MAX_DIFFERENCE)
    size = f"{len(texts)} texts of {TEXT_TOKENS} tokens"
    what = f"largest difference of a probability from transformers', {size}, float32"
    probs = Measure(
        "quant.torch_draft.probs", what, float(f"{difference:.3g}"), "", wording, is_met(difference)
    )
    num_drafts = NUM_HISTORIES * len(drafts)
    what = (
        f"drafts after rollback unlike a fresh sequence's, bit for bit, of {num_drafts}: {', '.join(drafts)}"
    )
    num_unlike = sum(each.num_unlike for each in rolled.values())
    rollback = judged("quant.torch_draft.rollback", what, num_unlike, "drafts", at_most(0))
    what = f"texts unlike cloud-only's, of {happened['texts']}, trees and chains, over links with faults"
    same = judged("quant.torch_draft.same_text", what, len(different), "texts", at_most(0))
    return [probs, rollback, same], {
        "total_variation_from_source": {name: str(each) for name, each in distances.items()},
        "onnx_export_from_source": str(export.from_source),
        "rollback": {name: asdict(each) for name, each in rolled.items()},
        "runtimes": {name: draft.runtime for name, draft in drafts.items()},
        "different": different,
        "happened": dict(happened),
    }


def _texts(draft: TorchDraftModel) -> list[list[int]]:
    """Returns held-out prompts, each continued by the draft itself."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    texts = []
    for prompt in load_prompts(limit=NUM_PROMPTS):
        sequence = draft.sequence(SAMPLED)
        token_ids = tokenizer.encode(prompt.text)[:TEXT_TOKENS]
        sequence.commit(token_ids)
        texts.append([*token_ids, *sequence.propose(TEXT_TOKENS - len(token_ids)).token_ids])
    return texts


def _compare(
    source: Path, drafts: dict[str, TorchDraftModel], texts: list[list[int]]
) -> tuple[float, dict[str, Distance]]:
    """Returns the largest difference in float32, and how far each way is from the source."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    num_tokens = drafts["float32"].num_tokens
    with torch.inference_mode():
        wanted = [model(torch.tensor([text])).logits[0, :, :num_tokens].softmax(-1).numpy() for text in texts]
    difference = 0.0
    distances = {}
    for name, draft in drafts.items():
        found = [_read(draft, text) for text in texts]
        distances[name] = Distance.between(np.concatenate(found), np.concatenate(wanted))
        if name == "float32":
            difference = max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
            for text, rows in zip(texts, wanted, strict=True):
                chunk = draft.sequence(SAMPLED).parts[0].feed(text, 0).probs[0]
                difference = max(difference, float(np.abs(chunk - rows[-1]).max()))
    return difference, distances


def _read(draft: TorchDraftModel, text: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    runner, _ = draft.sequence(SamplingParams(temperature=1.0)).parts
    return np.stack([runner.feed([each], at).probs[0].copy() for at, each in enumerate(text)])


@dataclass
class Rolled:
    """Compares drafts after rollbacks with those of a sequence that never drafted before."""

    num_unlike: int = 0  # where that one read the same text in the same parts
    num_unlike_at_once: int = 0  # tokens, where it read all at once, which rounds to other last digits
    largest_at_once: float = 0.0  # difference of the first token's probabilities then


def _roll_back(draft: TorchDraftModel) -> Rolled:
    rolled = Rolled()
    for number in range(NUM_HISTORIES):
        used, cuts = _history(draft, random.Random(number))
        fresh, at_once = draft.sequence(SAMPLED), draft.sequence(SAMPLED)
        for cut in cuts:
            fresh.commit(cut)
            at_once.commit(cut)
            fresh.propose(1)
        ours = used.propose(6)
        rolled.num_unlike += ours != fresh.propose(6)
        rolled.num_unlike_at_once += ours.token_ids != at_once.propose(6).token_ids
        rows = [each.feed_root().probs.copy() for each in (used, at_once)]
        rolled.largest_at_once = max(rolled.largest_at_once, float(np.abs(rows[0] - rows[1]).max()))
    return rolled


def _history(draft: TorchDraftModel, chance: random.Random) -> tuple[TorchDraftSequence, list[TokenIds]]:
    """Returns a sequence that drafted, and whose drafts were rejected, and the parts in which its text was fed."""
    sequence = draft.sequence(SAMPLED)
    cuts: list[TokenIds] = []
    for _ in range(NUM_STEPS):
        cut = tuple(chance.randrange(draft.num_tokens) for _ in range(chance.randrange(1, 9)))
        sequence.commit(cut)
        cuts.append(cut)
        proposed = _propose(sequence, chance)
        if chance.random() < 0.4:  # taken as right, and then taken back
            sequence.commit(proposed[: chance.randrange(1, len(proposed) + 1)])
            _propose(sequence, chance)
            sequence.truncate(sum(map(len, cuts)))
        sequence.check_integrity()
    last = (chance.randrange(draft.num_tokens),)
    sequence.commit(last)
    return sequence, [*cuts, last]


def _propose(sequence: TorchDraftSequence, chance: random.Random) -> TokenIds:
    if chance.random() < 0.5:
        return sequence.propose(chance.randrange(2, 7)).token_ids
    draft = sequence.propose_tree(TREE, NodeValues())
    path = Tree(draft.parents).path(chance.randrange(len(draft.token_ids)))
    return tuple(draft.token_ids[node] for node in path)


def _write(drafts: dict[str, TorchDraftModel]) -> tuple[list[str], Counter[str]]:
    """Returns which texts differ from cloud-only's, and what happened in them."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    realisation = best_realisation()
    faults = [each for each in FAULTS if not realisation.refusals(each.profile)]
    different: list[str] = []
    happened: Counter[str] = Counter()
    with running_verifier("--log-level", "error") as verifier, ExitStack() as stack:
        links = [stack.enter_context(realisation.open(each.profile, verifier.address)) for each in faults]
        for number, (name, prompt, temperature) in enumerate(_cases(drafts)):
            fault, link = faults[number % len(faults)], links[number % len(faults)]
            alone = Decoder(verifier.address, drafts[name], tokenizer).decode(
                prompt, Case(ExecutionMode.CLOUD_ONLY, temperature), NUM_NEW, number
            )
            result = Decoder(link.address, drafts[name], tokenizer).decode(
                prompt,
                Case(ExecutionMode.SPECULATIVE, temperature, 4, tree=TREE if number % 3 else None),
                NUM_NEW,
                number,
                window=create_window(Pipelining.ON if number % 2 else Pipelining.OFF, None, "fixed"),
                deadline_s=None,
                on_event=_strikes(fault, link, random.Random(number)),
            )
            stats = result.stats
            happened += Counter(
                texts=1,
                rounds=len(stats.rounds),
                accepted=sum(each.num_accepted_tokens for each in stats.rounds),
                reconnects=stats.num_reconnects,
                rebuilds=stats.num_rebuilds,
                timeouts=stats.num_timeouts,
            )
            if result.token_ids != alone.token_ids:
                different.append(f"#{number}: {name}, {fault.profile.name}, T={temperature:g}")
    return different, happened


def _cases(drafts: dict[str, TorchDraftModel]) -> Iterator[tuple[str, str, float]]:
    for prompt in load_prompts(limit=NUM_PROMPTS):
        for temperature in (0.8, 0.0):
            for name in drafts:
                yield name, prompt.text, temperature


def _strikes(fault: Fault, link: OpenLink, chance: random.Random) -> Any:
    resets = chance.sample(range(2, NUM_NEW - 4), fault.num_resets)

    def on_event(event: SessionEvent) -> None:
        if isinstance(event, TokenEvent) and event.index in resets:
            fault.strike(link)

    return on_event
