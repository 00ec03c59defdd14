"""A judged tree in a few rows of a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from outrider.edge_client.core.stats import JudgedTree
from outrider.edge_client.ui.tree_rows import tree_rows

TEXTS = {1: "if ", 2: "name:", 3: "path", 4: ".is", 5: "for ", 6: "x\n", 7: "\x1b[2J", 8: "end"}
# if ┬ name:
#    └ path ┬ .is
#           └ x⏎
# for ─ (control characters)
TREE = JudgedTree((1, 2, 3, 4, 6, 5, 7), (-1, 0, 0, 2, 2, -1, 5), (0, 2), 8)


def rows_of(tree: JudgedTree, num_rows: int = 9, num_columns: int = 60) -> list[Text]:
    return tree_rows(tree, TEXTS.__getitem__, num_rows, num_columns)


def styles(row: Text) -> Sequence[str]:
    return [str(span.style) for span in row.spans] or [str(row.style)]


def test_the_accepted_path_leads_and_branches_begin_where_they_leave_it() -> None:
    rows = rows_of(TREE)
    assert [row.plain for row in rows] == [
        "if pathend",
        "└ for \ufffd[2J",
        "   └ name:",
        "       └ .is",
        "       └ x⏎",
    ]
    assert styles(rows[0]) == ["green", "green", "yellow"], "something else had been drafted there"
    assert all(styles(row) == ["dim"] for row in rows[1:])


def test_after_a_leaf_comes_a_bonus_and_after_the_texts_end_nothing() -> None:
    leaf = JudgedTree(TREE.token_ids, TREE.parents, (0, 2, 3), 8)
    assert styles(rows_of(leaf)[0])[-1] == "cyan"
    ended = JudgedTree(TREE.token_ids, TREE.parents, (0, 2, 3), None)
    assert rows_of(ended)[0].plain == "if path.is"


def test_what_has_no_room_is_counted_and_long_rows_are_cut() -> None:
    rows = rows_of(TREE, 3, 6)
    assert [row.plain for row in rows] == ["if pa…", "└ for…", "and 3…"]
    assert rows_of(JudgedTree((1, 5), (-1, -1), (), 8), 3)[0].plain == "end"
