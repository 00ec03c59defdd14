"""`str.cost`: a token's time with a schema against without, in the verifier's step and in the edge's draft."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from benchmarks.results_file import Found
from benchmarks.structured.clients import load_texts, serving_client
from outrider.common.grammar.vocabulary import Vocabulary
from outrider.common.types import Grammar, GrammarKind, SamplingParams
from outrider.edge_client.drafting.drafter import Drafter
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.library.client import Client
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.results import Measure, at_most, judged
from outrider.models import EMBEDDED

# Long enough for every text: strings, numbers and names in turn.
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 4, "maxLength": 16},
            "size": {"type": "integer", "minimum": 0, "maximum": 9999},
            "kind": {"enum": ["file", "socket", "pipe"]},
        },
        "required": ["name", "size", "kind"],
        "additionalProperties": False,
    },
    "minItems": 100,
}
NUM_PAIRS, NUM_NEW = 24, 96
NUM_DRAFTED = 8


def run() -> Found:
    """Returns the measures; with, without and without again alternate."""
    with serving_client(mode="cloud-only") as client:
        verifier = [_streamed_ms(client, prompt, pair) for pair, prompt in enumerate(_prompts())]
    draft = _drafted_ms()
    measures, details = list[Measure](), dict[str, object]()
    for name, what, triples in (
        ("verifier", "streamed token, cloud-only", verifier),
        ("draft", "drafted token", draft),
    ):
        ratio = median(constrained / plain for constrained, plain, _ in triples)
        again = median(other / plain for _, plain, other in triples)
        words = f"{what}, temperature .8: with a schema : without (A/A {again:.3f})"
        measures.append(judged(f"str.cost.{name}", words, ratio, "ratio", at_most(1.15)))
        details[name] = {"ms": [median(each) for each in zip(*triples, strict=True)], "a_a": again}
    return measures, details


def _prompts() -> Sequence[str]:
    return load_texts()[:NUM_PAIRS]


def _streamed_ms(client: Client, prompt: str, seed: int) -> tuple[float, float, float]:
    def tpot_ms(**grammar: object) -> float:
        result = client.generate(prompt, seed=seed, max_new_tokens=NUM_NEW, ignore_eos=True, **grammar)
        ours = result.usage["outrider"]
        assert isinstance(ours, dict) and len(result.ids) == NUM_NEW
        return float(ours["tpot_ms"])

    return tpot_ms(json_schema=SCHEMA), tpot_ms(), tpot_ms()


def _drafted_ms() -> list[tuple[float, float, float]]:
    """Drafts after the same texts, which are plain ones; the schema's output begins after them."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    with OnnxDraftModel.open(EMBEDDED / "draft", threads=1) as model:
        where = EMBEDDED / "draft" / "tokenizer.json", model.num_tokens, model.eos_token_ids
        grammar = Vocabulary.open(*where).compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)))
        plain = SamplingParams(temperature=0.8, seed=1)
        cases = replace(plain, grammar=grammar), plain, plain
        found = []
        for prompt in _prompts():
            prompt_ids = tokenizer.encode(prompt)
            constrained, one, other = (_time(model, sampling, prompt_ids) for sampling in cases)
            found.append((constrained, one, other))
    return found


def _time(model: OnnxDraftModel, sampling: SamplingParams, prompt_ids: list[int]) -> float:
    """Returns the ms of a drafted token, of drafts that follow one another."""
    drafter = Drafter(model, sampling, len(prompt_ids))
    drafter.warm_up(prompt_ids)
    token_ids, took_ms, num_tokens = list(prompt_ids), 0.0, 0
    for number in range(1 + NUM_NEW // NUM_DRAFTED):
        draft, ms = drafter.propose(token_ids, NUM_DRAFTED)
        token_ids += draft.token_ids
        if number:  # the first has noise and rows to set up
            took_ms, num_tokens = took_ms + ms, num_tokens + len(draft.token_ids)
    drafter.close()
    return took_ms / num_tokens
