"""The tokenizer both models share, by Hugging Face `tokenizers`: encodes prompts, decodes token by token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from outrider.common.errors import ModelError, UsageError
from outrider.common.models import fingerprint


class EdgeTokenizer:
    """Raises `ModelError` when `tokenizer.json` is missing or unreadable."""

    def __init__(self, tokenizer_json: Path) -> None:
        from tokenizers import Tokenizer

        if not tokenizer_json.is_file():
            raise ModelError(
                f"{tokenizer_json.parent} has no {tokenizer_json.name}: it is no draft's directory "
                "(`edge-client draft export` makes one)"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_json))
        except Exception as error:  # the library raises bare exceptions
            raise ModelError(f"{tokenizer_json} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._path = tokenizer_json

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 (DESIGN §4)."""
        return fingerprint.tokenizer_fingerprint(self._path)

    @cached_property
    def num_tokens(self) -> int:
        return fingerprint.num_tokens(self._path)

    def encode(self, text: str, is_complete: bool = False) -> list[int]:
        """With whatever the tokenizer itself puts around a text (a begin-of-text token, say); without it
        where the text `is_complete`, as a chat template's is. Raises `UsageError` for text that is no
        Unicode: bytes of another encoding reach us as lone surrogates."""
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=not is_complete).ids)
        except TypeError as error:
            where = next(i for i, letter in enumerate(text) if "\ud800" <= letter <= "\udfff")
            raise UsageError(f"text is not UTF-8, from its character {where + 1} on") from error

    def token_text(self, token_id: int) -> str:
        """A token by itself, special ones by name; part of a character shows as U+FFFD."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def decoder(self, prompt_ids: list[int] | None = None) -> Callable[[int], str]:
        """A new incremental decoder: an id in, the text that became final with it out.

        Special tokens show as nothing, and so does a partial character until its last token. `prompt_ids`
        tell it what came before, so that a leading space is kept.
        """
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(ids=prompt_ids or [], skip_special_tokens=True)
        return lambda token_id: stream.step(self._tokenizer, token_id) or ""
