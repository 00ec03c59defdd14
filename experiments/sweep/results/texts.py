"""Are these the target's own texts? Token ids against cloud-only's, by prompt and seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.common.sequences import common_prefix
from outrider.experiments.sweep.config.cells import Cell
from outrider.experiments.sweep.results.records import RequestRow, TextCheck

MAX_TIE_SHARE = 1e-4  # docs/design.md §7: more than 1 token in 10,000 is no float error any more
_MAX_EXAMPLES = 5

TextKey = tuple[float, str, str, int]  # temperature, constraint, prompt, seed

# Whether two different tokens were a tie for the target: (row, index of the first difference, token of the
# reference) -> True, False, or None where nobody can tell.
JudgeTie = Callable[[RequestRow, int, int], bool | None]


@dataclass(frozen=True, slots=True)
class References:
    """Holds cloud-only's token ids by text. The link cannot matter, so one serves all."""

    by_text: Mapping[TextKey, Sequence[int]]

    def get(self, cell: Cell, row: RequestRow) -> Sequence[int] | None:
        """Returns the token ids that the row is compared with; None where there are none."""
        return self.by_text.get(_key(cell, row))


def collect_references(cells: Sequence[Cell], rows: Mapping[str, Sequence[RequestRow]]) -> References:
    """Takes the texts of the first cloud-only cell that has each. The other cloud-only cells are compared
    with it."""
    found: dict[TextKey, Sequence[int]] = {}
    for cell in cells:
        if cell.mode == "cloud-only":
            for row in _comparable(rows.get(cell.id, ())):
                found.setdefault(_key(cell, row), row.token_ids)
    return References(found)


def _key(cell: Cell, row: RequestRow) -> TextKey:
    return cell.temperature, cell.constraint.name, row.prompt, row.seed


def check_texts(cell: Cell, rows: Sequence[RequestRow], references: References, judge: JudgeTie) -> TextCheck:
    """Compares every request that has a reference; only cells that promise the same text are judged."""
    counts = dict.fromkeys(("equal", "ties", "different", "unjudged", "skipped"), 0)
    examples: list[str] = []
    num_same = num_longest = 0
    for row in rows:
        reference = references.get(cell, row)
        if reference is None or row.error:
            counts["skipped"] += 1
            continue
        num_same += sum(a == b for a, b in zip(row.token_ids, reference, strict=False))
        num_longest += max(len(row.token_ids), len(reference))
        if cell.is_exact_text and row.num_unverified_tokens:
            counts["skipped"] += 1  # it says itself that it is not the target's
            continue
        outcome = _compare(row, reference, judge if cell.is_exact_text else _nobody)
        counts[outcome] += 1
        if outcome == "different" and len(examples) < _MAX_EXAMPLES:
            examples.append(row.request)
    return TextCheck(
        is_exact_text=cell.is_exact_text,
        num_compared=len(rows) - counts["skipped"],
        num_equal=counts["equal"],
        num_ties=counts["ties"],
        num_different=counts["different"],
        num_unjudged=counts["unjudged"],
        num_skipped=counts["skipped"],
        share_equal=round(num_same / num_longest, 6) if num_longest else None,
        examples=examples,
    )


def num_failures(checks: Iterable[TextCheck], num_tokens: int, is_complete: bool) -> int:
    """Counts texts that differ without excuse; ties above their share are no excuse either (one is always
    allowed). A difference that nobody could judge counts, as it may be real, once the sweep is complete: before, those
    are judged later."""
    exact = [check for check in checks if check.is_exact_text]
    ties = sum(check.num_ties for check in exact)
    failures = sum(check.num_different + (check.num_unjudged if is_complete else 0) for check in exact)
    return failures + (ties if ties > max(1.0, num_tokens * MAX_TIE_SHARE) else 0)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Returns the index of the first token that differs or is missing on one side; None for equal texts."""
    index = common_prefix(ours, theirs)
    return None if index == len(ours) == len(theirs) else index


def _compare(row: RequestRow, reference: Sequence[int], judge: JudgeTie) -> str:
    index = first_difference(row.token_ids, reference)
    if index is None:
        return "equal"
    if index >= min(len(row.token_ids), len(reference)):
        return "different"  # one goes on where the other ends: no choice between two tokens
    verdict = judge(row, index, reference[index])
    return "unjudged" if verdict is None else "ties" if verdict else "different"


def _comparable(rows: Sequence[RequestRow]) -> list[RequestRow]:
    return [row for row in rows if not row.error and not row.num_unverified_tokens]


def _nobody(row: RequestRow, index: int, token_id: int) -> bool | None:
    return None
