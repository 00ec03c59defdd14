"""Makes text rules by name: which drafted text only the target may write, however sure the draft is.

A rule looks at the tokens themselves, so it ends a draft after the token that it finds, never before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.common.errors import UsageError
from outrider.edge_client.gate.text_rule import TextRule
from outrider.edge_client.gate.words import DEFAULT_RARE_PER_MILLION, WordCounts


@dataclass(frozen=True, slots=True)
class RuleNeeds:
    """Holds what single rules need beside the text."""

    ner: str = ""  # a spaCy pipeline for `entities`; empty: by the looks of words
    words: WordCounts | None = None  # for `rare`
    rare_per_million: float = DEFAULT_RARE_PER_MILLION


def create_rules(names: Sequence[str], needs: RuleNeeds = RuleNeeds()) -> tuple[TextRule, ...]:
    """Returns the rules with these names. Raises `UsageError` for an unknown name, and where a rule lacks
    what it needs."""
    unknown = [name for name in names if name not in _FACTORIES]
    if unknown:
        raise UsageError(f"unknown gate rule {unknown[0]!r}; known: {', '.join(RULES)}")
    if needs.ner and "entities" not in names:
        raise UsageError("--gate-ner finds names for the rule entities: add it to --gate-rules")
    return tuple(_FACTORIES[name](needs) for name in names)


def _pattern(name: str) -> Callable[[RuleNeeds], TextRule]:
    def create(needs: RuleNeeds) -> TextRule:
        from outrider.edge_client.gate import patterns
        from outrider.edge_client.gate.text_rule import SpanRule

        return SpanRule(getattr(patterns, f"find_{name}"))

    return create


def _entities(needs: RuleNeeds) -> TextRule:
    from outrider.edge_client.gate.text_rule import SpanRule

    if needs.ner:
        from outrider.edge_client.gate.ner import NamedEntities

        return SpanRule(NamedEntities(needs.ner).find)
    from outrider.edge_client.gate.names import find_names

    return SpanRule(find_names)


def _rare(needs: RuleNeeds) -> TextRule:
    from outrider.edge_client.gate.text_rule import SpanRule

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
