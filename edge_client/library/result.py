"""Holds a finished text, and shows it in a notebook."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass

from outrider.common.types import FinishReason, Origin, TokenIds, TokenLogprobs
from outrider.edge_client.session.shared_edge import Prepared
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer

# As on a terminal (`ui/terminal.py`), in shades that can be read on light and dark pages.
_STYLES = {Origin.ACCEPTED: "color:#2f9e5b", Origin.CORRECTION: "color:#c07f00"}
_UNVERIFIED_STYLE = "color:#e03131;text-decoration:underline"


@dataclass(frozen=True, slots=True)
class Result:
    """Holds what one call generated; tuples have one item for each new token.

    `pieces` are the tokens' texts and together `text`; a token may have none. `usage` has the daemon's names
    (docs/daemon.md): counts of tokens, and under `outrider` how the text was made. `exact` is whether the text is
    distributed as the target's own; None where there is none. `logprobs` are filled where asked for.
    """

    text: str
    ids: TokenIds
    origins: tuple[Origin, ...]
    is_verified: tuple[bool, ...]
    pieces: tuple[str, ...]
    finish_reason: FinishReason
    seed: int
    exact: bool | None
    usage: dict[str, object]
    logprobs: tuple[TokenLogprobs | None, ...] = ()

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """Returns the text with each token coloured by its origin, and a line of counts."""
        spans = "".join(map(_span, self.pieces, self.origins, self.is_verified))
        counts = {origin: self.origins.count(origin) for origin in Origin if origin in self.origins}
        parts = [f"{len(self.ids)} tokens", *(f"{number} {origin}" for origin, number in counts.items())]
        if self.exact is not None:
            parts.append("exact" if self.exact else "not exact")
        note = " · ".join([*parts, f"seed {self.seed}"])
        return f'<pre style="white-space:pre-wrap">{spans}</pre><small>{html.escape(note)}</small>'


def make_result(prepared: Prepared, tokenizer: EdgeTokenizer) -> Result:
    """Returns the result of a session that is over."""
    result, usage = prepared.session.result, prepared.usage
    ours = usage["outrider"]
    assert isinstance(ours, dict)
    decode = tokenizer.decoder(list(prepared.prompt_ids), prepared.config.stop.show_special_tokens)
    return Result(
        text=result.text,
        ids=result.token_ids,
        origins=result.origins,
        is_verified=result.is_verified,
        pieces=_split(result.text, result.token_ids, decode),
        finish_reason=result.finish_reason,
        seed=prepared.seed,
        exact=ours["exact"],
        usage=usage,
        logprobs=result.logprobs,
    )


def _split(text: str, token_ids: TokenIds, decode: Callable[[int], str]) -> tuple[str, ...]:
    """Returns the part of the text that became final with each token; the last one's has the rest."""
    pieces, start = [], 0
    for token_id in token_ids:
        end = min(len(text), start + len(decode(token_id)))
        pieces.append(text[start:end])
        start = end
    return (*pieces[:-1], pieces[-1] + text[start:]) if pieces else ()


def _span(piece: str, origin: Origin, is_verified: bool) -> str:
    style = _STYLES.get(origin, "") if is_verified else _UNVERIFIED_STYLE
    title = str(origin) if is_verified else f"{origin}, unverified"
    return f'<span title="{title}" style="{style}">{html.escape(piece)}</span>' if piece else ""
