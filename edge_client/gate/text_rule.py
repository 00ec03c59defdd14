"""The text of a drafted block, and the protocol of a rule that looks at it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

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
