"""Text rules: what only the target may write, however sure the draft is. By name, each made when asked for.

A rule looks at the tokens themselves, so it ends a draft after the token that it doubts, never before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.common.errors import UsageError
from outrider.edge_client.gate.words import DEFAULT_RARE_PER_MILLION, WordCounts

CONTEXT_TOKENS = 32  # of the text before a block, decoded for the rules

NewDecoder = Callable[[list[int] | None], Callable[[int], str]]
"""`EdgeTokenizer.decoder`: given what came before, an id in, the text that became final with it out."""


class BlockText:
    """A drafted block as text, as it grows. `pieces[i]` is what token i makes final: empty while a character
    is not whole. A word or a number may begin in the `context`."""

    def __init__(self, text_ids: Sequence[int], new_decoder: NewDecoder) -> None:
        context_ids = list(text_ids[-CONTEXT_TOKENS:])
        self.context = "".join(map(new_decoder(None), context_ids))
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self._decode = new_decoder(context_ids)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.pieces.append(self._decode(token_id))

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class TextRule(Protocol):
    """Keeps nothing between calls: one serves all sessions."""

    def doubted(self, block: BlockText) -> Collection[int]:
        """Indices of the block's tokens that are for the target, as far as the block and what comes before
        it tell by now; empty where none is. Asked after every drafted token."""
        ...


@dataclass(frozen=True, slots=True)
class RuleNeeds:
    """What single rules need beside the text."""

    ner: str = ""  # a spaCy pipeline for `entities`; empty: by the looks of words
    words: WordCounts | None = None  # for `rare`
    rare_per_million: float = DEFAULT_RARE_PER_MILLION


def create_rules(names: Sequence[str], needs: RuleNeeds = RuleNeeds()) -> tuple[TextRule, ...]:
    """Raises `UsageError` for a name that is not built, and for what a rule needs and has not."""
    unknown = [name for name in names if name not in _FACTORIES]
    if unknown:
        raise UsageError(f"unknown gate rule {unknown[0]!r}; known: {', '.join(RULES)}")
    if needs.ner and "entities" not in names:
        raise UsageError("--gate-ner finds names for the rule entities: add it to --gate-rules")
    return tuple(_FACTORIES[name](needs) for name in names)


def _pattern(name: str) -> Callable[[RuleNeeds], TextRule]:
    def create(needs: RuleNeeds) -> TextRule:
        from outrider.edge_client.gate import patterns
        from outrider.edge_client.gate.spans import SpanRule

        return SpanRule(getattr(patterns, f"find_{name}"))

    return create


def _entities(needs: RuleNeeds) -> TextRule:
    from outrider.edge_client.gate.spans import SpanRule

    if needs.ner:
        from outrider.edge_client.gate.ner import NamedEntities

        return SpanRule(NamedEntities(needs.ner).find)
    from outrider.edge_client.gate.names import find_names

    return SpanRule(find_names)


def _rare(needs: RuleNeeds) -> TextRule:
    from outrider.edge_client.gate.spans import SpanRule

    if needs.words is None:
        raise UsageError(
            "the gate rule rare goes by how often words occur: edge-client calibrate counts them, and "
            "--gate-file takes what it wrote"
        )
    return SpanRule(needs.words.common(needs.rare_per_million).find_others)


_FACTORIES: dict[str, Callable[[RuleNeeds], TextRule]] = {
    "digits": _pattern("digits"),
    "dates": _pattern("dates"),
    "amounts": _pattern("amounts"),
    "entities": _entities,
    "rare": _rare,
}
RULES = tuple(_FACTORIES)
