"""Encodes prompts and decodes tokens with the tokenizer that draft and target share, by Hugging Face
`tokenizers`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from outrider.common.errors import ModelError, UsageError
from outrider.common.models import fingerprint


class EdgeTokenizer:
    """Loads a tokenizer. Raises `ModelError` where `tokenizer.json` is missing or unreadable."""

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
        """Returns the tokenizer's SHA-256 in hex."""
        return fingerprint.tokenizer_fingerprint(self._path)

    @cached_property
    def num_tokens(self) -> int:
        """Returns the number of token ids."""
        return fingerprint.num_tokens(self._path)

    def encode(self, text: str, is_complete: bool = False) -> list[int]:
        """Returns the token ids of a text, with the special tokens that the tokenizer adds (begin of text,
        say), or without them where the text `is_complete`, as a rendered chat template is. Raises
        `UsageError` for text that is not Unicode: bytes of another encoding arrive as lone surrogates."""
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=not is_complete).ids)
        except TypeError as error:
            where = next(i for i, letter in enumerate(text) if "\ud800" <= letter <= "\udfff")
            raise UsageError(f"text is not UTF-8, from its character {where + 1} on") from error

    def token_text(self, token_id: int) -> str:
        """Returns one token's text, of a special token its name; a part of a character is U+FFFD."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def decoder(self, prompt_ids: list[int] | None = None) -> Callable[[int], str]:
        """Returns a new incremental decoder: it takes an id and returns the text that became complete with
        it.

        Special tokens give no text, and a partial character gives none until its last token. `prompt_ids` are
        the tokens before, so that a leading space is kept.
        """
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(ids=prompt_ids or [], skip_special_tokens=True)
        return lambda token_id: stream.step(self._tokenizer, token_id) or ""
