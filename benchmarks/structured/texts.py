"""`str.schema`, `str.same_text`: texts obey 200 schemas, and are cloud-only's however they are drafted."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import jsonschema

from benchmarks.results_file import Found
from benchmarks.structured.clients import load_texts, serving_client
from benchmarks.structured.schemas import Schema, make_schemas
from outrider.common.grammar.state import state_of
from outrider.common.grammar.vocabulary import Vocabulary
from outrider.common.types import FinishReason, Grammar, GrammarKind
from outrider.edge_client.library.client import Client
from outrider.edge_client.library.result import Result
from outrider.experiments.shared.results import Measure, at_least, at_most, judged
from outrider.models import EMBEDDED

NUM_NEW = 512
TEMPERATURES = (0.0, 0.8)
# Each way of drafting: settings of a call.
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"mode": "speculative", "num_speculative_tokens": 4},
    "tree": {"mode": "speculative", "tree": 16},
    "pipelined": {"mode": "speculative", "pipeline": "on", "num_rounds_in_flight": 3},
    "co-located": {"mode": "co-located", "num_speculative_tokens": 4},
}


def run() -> Found:
    """Returns the measures."""
    vocabulary = Vocabulary.open(EMBEDDED / "target" / "tokenizer.json", 8192, (0,))
    counts, differing = Counter[str](), Counter[str](dict.fromkeys(WAYS, 0))
    schemas, prompts = make_schemas(), load_texts()
    with serving_client() as client:
        for number, schema in enumerate(schemas):
            prompt, seed = prompts[number % len(prompts)], number
            for temperature in TEMPERATURES:
                call = {"json_schema": schema, "temperature": temperature, "seed": seed}
                alone = write(client, prompt, {**call, "mode": "cloud-only"})
                counts += Counter(judge(alone, schema, vocabulary))
                for name, way in WAYS.items():
                    differing[name] += write(client, prompt, {**call, **way}).ids != alone.ids
    num_texts = counts["finished"] + counts["cut"]
    share = counts["valid"] / num_texts
    what = f"texts that obey {len(schemas)} schemas at temperatures 0 and .8: finished ones valid, cut ones prefixes"
    about = f"share finished within {NUM_NEW} tokens"
    same = f"texts unlike cloud-only's of {num_texts} each, drafted as {', '.join(WAYS)}"
    return [
        judged("str.schema", what, share, "share", at_least(1.0)),
        Measure("str.schema.finished", about, round(counts["finished"] / num_texts, 4), "share"),
        judged("str.same_text", same, sum(differing.values()), "texts", at_most(0)),
    ], {"counts": dict(counts), "differing": dict(differing)}


def write(client: Client, prompt: str, call: dict[str, Any]) -> Result:
    """Returns one text."""
    return client.generate(prompt, max_new_tokens=NUM_NEW, **call)


def judge(result: Result, schema: Schema, vocabulary: Vocabulary) -> dict[str, int]:
    """Returns what a text counts as: of a finished one another library says whether it is valid."""
    if result.finish_reason is FinishReason.STOP:
        return {"finished": 1, "valid": int(is_valid(result.text, schema))}
    state = state_of(vocabulary.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))))
    state.extend(result.ids)
    return {"cut": 1, "valid": int(not state.is_ended)}


def is_valid(text: str, schema: Schema) -> bool:
    """Returns whether a text is JSON that a schema describes."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
