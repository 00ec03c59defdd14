"""Reads validation text from files and cuts it into passages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.common.errors import UsageError
from outrider.common.types import TokenIds


@dataclass(frozen=True, slots=True)
class ValidationText:
    """Holds the documents: each file is one, or each line of a .jsonl. `sha256` is over the files' bytes."""

    documents: tuple[str, ...]
    names: tuple[str, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class Passage:
    """Holds a prompt, and the document's tokens after it."""

    prompt_ids: TokenIds
    following_ids: TokenIds


def read_texts(paths: Sequence[Path]) -> ValidationText:
    """Returns the documents of all files. A line of a .jsonl has its text under "text" or "prompt". Raises
    `UsageError`."""
    digest = hashlib.sha256()
    documents: list[str] = []
    for path in paths:
        try:
            raw = path.read_bytes()
            text = raw.decode("utf-8")
        except OSError as error:
            raise UsageError(f"--text {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"--text {path} is not UTF-8: {error}") from error
        digest.update(raw)
        documents += _lines_of(path, text) if path.suffix == ".jsonl" else [text]
    found = tuple(document for document in documents if document.strip())
    if not found:
        raise UsageError(f"--text {' '.join(map(str, paths))}: there is no text in it")
    return ValidationText(found, tuple(path.name for path in paths), digest.hexdigest())


def cut_passages(
    documents: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    *,
    num_passages: int,
    num_prompt_tokens: int,
    num_following_tokens: int,
    needs_following: bool,
) -> list[Passage]:
    """Returns at most `num_passages`, spread evenly over all documents. A document that is no longer than a
    prompt is one passage, unless `needs_following`; what is left at the end of a longer one is none. Raises
    `UsageError` where there is none."""
    stride = num_prompt_tokens + num_following_tokens if needs_following else num_prompt_tokens
    passages = []
    for document in documents:
        ids = tuple(encode(document))
        if needs_following and num_prompt_tokens >= len(ids) > 1:  # a short one: half of it is prompt enough
            middle = len(ids) // 2
            passages.append(Passage(ids[:middle], ids[middle:]))
            continue
        for start in range(0, len(ids), stride):
            end = start + num_prompt_tokens
            passage = Passage(ids[start:end], ids[end : end + num_following_tokens])
            is_enough = not start or (
                not num_following_tokens and len(passage.prompt_ids) == num_prompt_tokens
            )
            if passage.following_ids or (is_enough and not needs_following):
                passages.append(passage)
    if not passages:
        raise UsageError("--text: too short: it takes documents of some tokens")
    step = max(1.0, len(passages) / num_passages)
    return [passages[int(index * step)] for index in range(min(num_passages, len(passages)))]


def _lines_of(path: Path, text: str) -> list[str]:
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):  # within a string JSON may have other line ends
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            found = record["text"] if "text" in record else record["prompt"]
            if not isinstance(found, str):
                raise TypeError(f"{found!r} is no text")
            documents.append(found)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f'--text {path}:{number}: want an object with "text" or "prompt" on every line'
            ) from error
    return documents
