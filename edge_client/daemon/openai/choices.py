"""The texts that one request asks for: `n` of each prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.common.sequences import common_prefix
from outrider.common.types import TokenIds
from outrider.edge_client.config.run_config import RunConfig

_MIN_SHARED_TOKENS = 16  # a block of the verifier's prefix cache
_SEED_BYTES = 6  # every reader of JSON keeps such a number


@dataclass(frozen=True, slots=True)
class Choice:
    """Holds one text to generate. `leader` is the index of an earlier choice that shares the beginning of its prompt,
    so that the verifier need not read it twice; None for a first one. `echo` is text that goes before it."""

    index: int
    prompt_ids: TokenIds
    seed: int
    leader: int | None
    is_first_of_prompt: bool = True
    echo: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Holds what a request generates, and with which settings."""

    config: RunConfig
    choices: tuple[Choice, ...]


def make_choices(
    prompts: Sequence[TokenIds], num_each: int, seed: int, echoes: Sequence[str]
) -> tuple[Choice, ...]:
    """Returns the choices, those of a prompt together, as OpenAI numbers them. `echoes` has a text for each prompt."""
    made: list[Choice] = []
    leaders: list[Choice] = []
    for prompt_ids, echo in zip(prompts, echoes, strict=True):
        for number in range(num_each):
            leader = next((each.index for each in leaders if _shares(each.prompt_ids, prompt_ids)), None)
            made.append(Choice(len(made), prompt_ids, choice_seed(seed, number), leader, number == 0, echo))
            if leader is None and len(prompt_ids) >= _MIN_SHARED_TOKENS:
                leaders.append(made[-1])
    return tuple(made)


def choice_seed(seed: int, number: int) -> int:
    """Returns the seed of a prompt's choice: the given one for choice 0, so that it is the text of a request for that
    one alone; others are hashes of the seed and `number`."""
    if number == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:_SEED_BYTES], "little")


def _shares(one: TokenIds, other: TokenIds) -> bool:
    return common_prefix(one[:_MIN_SHARED_TOKENS], other) == _MIN_SHARED_TOKENS
