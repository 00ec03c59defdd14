"""The held-out prompts as token ids, and ways of writing after them in turns.

Ways take turns text by text, in another order each time: what else runs on the machine changes within seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.prompts import load_prompts
from outrider.models import EMBEDDED

T = TypeVar("T")


def prompt_ids(num_prompts: int) -> list[list[int]]:
    """Returns the first prompts of the embedded pair."""
    tokenizer = EdgeTokenizer(EMBEDDED / "target" / "tokenizer.json")
    return [list(tokenizer.encode(each.text)) for each in load_prompts(limit=num_prompts)]


def take_turns(
    ways: Mapping[str, Callable[[list[int], int], T]], num_prompts: int, num_turns: int
) -> dict[str, list[T]]:
    """Returns what each way gives for each prompt and seed, in the same order for all, after a turn to warm up."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(-1, num_turns):
        for number, prompt in enumerate(prompt_ids(num_prompts)):
            first = (turn + number) % len(names)
            for name in names[first:] + names[:first]:
                value = ways[name](prompt, turn + 1)
                if turn >= 0:
                    found[name].append(value)
    return found
