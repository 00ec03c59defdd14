"""Encodes prompts and decodes tokens with the tokenizer that draft and target share, by Hugging Face
`tokenizers`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from outrider.common.errors import ModelError, UsageError
from outrider.common.models import fingerprint

log = logging.getLogger(__name__)

_REPLACEMENT = "\ufffd"  # stands for bytes that are no character
_CHARACTER_TOKENS = 16  # more than a character has


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
        self._tokenizer.no_padding()
        self._path = tokenizer_json
        # A unigram model does not name its unknown token.
        unknown = getattr(self._tokenizer.model, "unk_token", "<unk>")
        self._unknown_id = None if unknown is None else self._tokenizer.token_to_id(unknown)
        self._known_characters: set[str] = set()
        self._has_warned = False

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
        say), or without them where the text `is_complete`, as a rendered chat template is. Warns once of
        characters without a token. Raises `UsageError` for text that is not Unicode: bytes of another
        encoding arrive as lone surrogates."""
        try:
            token_ids = list(self._tokenizer.encode(text, add_special_tokens=not is_complete).ids)
        except TypeError as error:
            where = next(i for i, letter in enumerate(text) if "\ud800" <= letter <= "\udfff")
            raise UsageError(f"text is not UTF-8, from its character {where + 1} on") from error
        if not self._has_warned and self._loses_characters(text, token_ids):
            self._has_warned = True
            log.warning(
                "the text has characters that %s has no token for: draft and target see them as unknown, or "
                "not at all",
                self._path,
            )
        return token_ids

    def _loses_characters(self, text: str, token_ids: Sequence[int]) -> bool:
        if self._unknown_id is not None:
            return self._unknown_id in token_ids
        for each in set(text) - self._known_characters:  # without an unknown token they are left out
            if not each.isspace() and not self._tokenizer.encode(each, add_special_tokens=False).ids:
                return True
            self._known_characters.add(each)
        return False

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of some tokens, with the names of special ones."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        """Returns one token's text within a text, of a special token its name; a part of a character is U+FFFD."""
        # Many tokenizers take the space off what begins a text: what follows a letter keeps it.
        letter_ids, letter = self._letter
        both = self.decode([*letter_ids, token_id])
        return both[len(letter) :] if letter and both.startswith(letter) else self.decode([token_id])

    @cached_property
    def _letter(self) -> tuple[list[int], str]:
        token_ids = list(self._tokenizer.encode("a", add_special_tokens=False).ids)
        return token_ids, self.decode(token_ids)

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token that stands for a text by itself, such as `<tool_call>`; None where there is
        none."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def is_special(self, token_id: int) -> bool:
        """Returns whether a token is special: it gives no text unless asked for."""
        added = self._tokenizer.get_added_tokens_decoder().get(token_id)
        return added is not None and bool(added.special)

    def decoder(
        self, prompt_ids: list[int] | None = None, has_special_tokens: bool = False
    ) -> Callable[[int], str]:
        """Returns a new incremental decoder: it takes an id and returns the text that became complete with
        it.

        Special tokens give no text unless `has_special_tokens`, and a partial character gives none until its last
        token. `prompt_ids` are the tokens before, so that a leading space is kept.
        """
        return _TextStream(self._tokenizer, prompt_ids or [], not has_special_tokens)


class _TextStream:
    """Gives out the text of tokens as it becomes complete, by the library's `DecodeStream`."""

    def __init__(self, tokenizer: Any, prompt_ids: list[int], skips_special_tokens: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._new = partial(DecodeStream, skip_special_tokens=skips_special_tokens)
        self._stream = self._new(ids=prompt_ids)
        self._silent_ids: list[int] = []  # the newest tokens, which gave no text yet
        self._prompt = ""  # its text, where it seems to end within a character: the stream then repeats it
        decode = partial(tokenizer.decode, skip_special_tokens=skips_special_tokens)
        if decode(prompt_ids[-_CHARACTER_TOKENS:]).endswith(_REPLACEMENT):
            self._prompt = decode(prompt_ids)

    def __call__(self, token_id: int) -> str:
        self._silent_ids.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id) or ""
        except Exception:
            # A bare one: with these bytes, which are no character, ones before them that were given out as text count
            # as damaged too.
            self._stream = self._new(ids=[])
            text = "".join(self._stream.step(self._tokenizer, each) or "" for each in self._silent_ids)
        if not text:
            return ""
        self._silent_ids.clear()
        prompt, self._prompt = self._prompt, ""
        return text.removeprefix(prompt if text.startswith(prompt) else prompt.rstrip(_REPLACEMENT))
