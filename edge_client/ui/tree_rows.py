"""Draws a judged tree in a few rows: the path that was accepted, and below it what was drafted beside it, faint.

def read_lines(path):⏎        the accepted tokens, and the target's own after them
        └ _file(                each branch begins in the column of the token that it would have followed
"""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len
from rich.text import Text

from outrider.common.tree import ROOT, Tree
from outrider.edge_client.core.stats import JudgedTree
from outrider.edge_client.ui.cells import without_control_characters

ACCEPTED, CORRECTED, BONUS, REJECTED = "green", "yellow", "cyan", "dim"  # as the live view's text
_MARK = "└ "


def tree_rows(
    judged: JudgedTree, text_of: Callable[[int], str], num_rows: int, num_columns: int
) -> list[Text]:
    """Returns at most `num_rows` rows: the accepted path first, then branches from left to right; the last row counts
    those for which there is no room. Rows are cut to `num_columns`."""
    tree = Tree(judged.parents)
    texts = [_shown(text_of(token_id)) for token_id in judged.token_ids]
    path = set(judged.accepted_nodes)
    # The column that comes after each node.
    ends = {ROOT: 0}
    for node, parent in enumerate(tree.parents):
        ends[node] = ends[parent] + cell_len(texts[node])
    rows = [_path_row(judged, tree, texts, text_of)]
    runs = [[node for node in run if node not in path] for run in tree.runs]
    branches = [run for run in runs if run]
    for run in sorted(branches, key=lambda run: ends[tree.parents[run[0]]]):
        row = Text(" " * ends[tree.parents[run[0]]] + _MARK + "".join(texts[node] for node in run), REJECTED)
        rows.append(row)
    if len(rows) > num_rows:
        num_hidden = len(rows) - num_rows + 1
        rows[num_rows - 1 :] = [Text(f"and {num_hidden} more", REJECTED)]
    for row in rows:
        row.truncate(num_columns, overflow="ellipsis")
    return rows


def _path_row(judged: JudgedTree, tree: Tree, texts: list[str], text_of: Callable[[int], str]) -> Text:
    row = Text.assemble(*((texts[node], ACCEPTED) for node in judged.accepted_nodes))
    if judged.next_token is not None:
        last = judged.accepted_nodes[-1] if judged.accepted_nodes else ROOT
        row.append(_shown(text_of(judged.next_token)), CORRECTED if tree.children(last) else BONUS)
    return row


def _shown(text: str) -> str:
    return without_control_characters(text).replace("\n", "⏎").replace("\t", "⇥")
