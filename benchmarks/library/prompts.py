"""The held-out prompts as token ids."""

from __future__ import annotations

from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.prompts import load_prompts
from outrider.models import EMBEDDED


def prompt_ids(num_prompts: int) -> list[list[int]]:
    """Returns the first prompts of the embedded pair."""
    tokenizer = EdgeTokenizer(EMBEDDED / "target" / "tokenizer.json")
    return [list(tokenizer.encode(each.text)) for each in load_prompts(limit=num_prompts)]
