"""What `make bench-pair` counts as a function, and as a round."""

from __future__ import annotations

import pytest

from benchmarks.pair.run import parse_figures
from benchmarks.sessions import Sessions
from outrider.common.types import FinishReason, Origin
from outrider.edge_client.core.stats import RoundRecord, SessionStats
from outrider.edge_client.session.session import SessionResult
from outrider.training.data.functions import first_function, is_python

PROMPT = 'def add(a, b):\n    """Add."""\n'


@pytest.mark.parametrize(
    ("completion", "function"),
    [
        ("    return a + b\n\n\ndef other():\n    pass\n", "    return a + b\n\n"),
        ("    c = a\n\n# a comment\n    return c\nx = 1\n", "    c = a\n\n# a comment\n    return c"),
        ("    return a", "    return a"),
        ("def other():\n    pass\n", ""),
        ("\treturn a\n@cache\n", "\treturn a"),
    ],
)
def test_a_function_ends_at_the_first_code_at_column_0(completion: str, function: str) -> None:
    assert first_function(completion) == function


@pytest.mark.parametrize(
    ("function", "is_valid"),
    [
        ("    return a + b", True),
        ("    return '\\d'  # an invalid escape is a warning\n", True),
        ("    return (a +", False),
        ("  return a", False),
        ("    return '\0'", False),
        ("", False),
        ("\n    # nothing but a comment\n", False),
    ],
)
def test_a_function_counts_when_it_has_a_body_and_parses_with_its_prompt(
    function: str, is_valid: bool
) -> None:
    assert is_python(PROMPT, function) is is_valid


def make_result(text: str, finish_reason: FinishReason = FinishReason.LENGTH) -> SessionResult:
    return SessionResult(text, (), (), (), finish_reason, None, SessionStats())


def test_functions_that_the_token_limit_cut_are_told_apart() -> None:
    cut, ended = "    return (a", "    return a\nnext = 1"
    texts = [make_result(cut), make_result(ended), make_result("    return a", FinishReason.STOP)]
    figures = parse_figures([PROMPT] * 3, texts)
    assert (figures.num_parsed, figures.num_cut_off, figures.num_prompts) == (2, 1, 3)


def make_rounds(*counts: tuple[int, int]) -> Sessions:
    """(drafted, accepted) of each round, after the opening's token."""
    stats = SessionStats(rounds=[RoundRecord(i, n, a, draft_ms=n * 0.5) for i, (n, a) in enumerate(counts)])
    accepted = sum(a for _, a in counts)
    origins = (Origin.TARGET, *[Origin.ACCEPTED] * accepted, *[Origin.CORRECTION] * len(counts))
    num = len(origins)
    return Sessions([SessionResult("", (0,) * num, origins, (True,) * num, FinishReason.LENGTH, None, stats)])


def test_tokens_a_round_leave_out_the_openings_and_count_rounds_without_a_draft() -> None:
    rounds = make_rounds((4, 4), (4, 1), (0, 0))
    assert rounds.tokens_per_round == pytest.approx((5 + 2 + 1) / 3)
    assert rounds.acceptance_rate == pytest.approx(5 / 8)
    assert rounds.acceptance(4) == pytest.approx([2 / 3, 1 / 2, 1.0, 1.0])
