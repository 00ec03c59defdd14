"""A user's own text as a token stream: plain text or JSON lines, encoded by the target's tokenizer."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from outrider.training.data.streams import Tokens
from outrider.training.draft.drafts import read_config

_SUFFIXES = (".txt", ".md", ".py", ".jsonl")


def read_texts(paths: Sequence[Path]) -> Iterator[str]:
    """Yields the documents of files and directories: a file is one, a line of .jsonl is one (its "text", or
    its "prompt").

    Raises ValueError naming the path, and the line, that cannot be read.
    """
    for path in paths:
        if path.is_dir():
            yield from read_texts(sorted(item for item in path.rglob("*") if item.suffix in _SUFFIXES))
        elif not path.is_file():
            raise ValueError(f"--text {path}: no such file or directory")
        elif path.suffix == ".jsonl":
            yield from _read_lines(path)
        else:
            yield _read_text(path)


def encode_for(target: Path, paths: Sequence[Path]) -> Tokens:
    """Returns the documents of files and directories as one stream of a target's ids. Raises ValueError naming what
    cannot be read."""
    fields = read_config(target)
    eos = fields.get("eos_token_id") or 0
    separator = eos[0] if isinstance(eos, list) else eos
    return encode_texts(
        read_texts(paths), target / "tokenizer.json", int(separator), int(fields["vocab_size"])
    )


def encode_texts(texts: Iterator[str], tokenizer_json: Path, separator_id: int, vocab_size: int) -> Tokens:
    """Returns one stream, the separator before each document. Raises ValueError where there is no text."""
    from tokenizers import Tokenizer

    if not tokenizer_json.is_file():
        raise ValueError(f"{tokenizer_json} is missing: the target's directory needs its tokenizer.json")
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids: list[int] = []
    for text in texts:
        ids.append(separator_id)
        ids.extend(tokenizer.encode(text, add_special_tokens=False).ids)
    if not ids:
        raise ValueError(f"--text holds no documents: files ending in {', '.join(_SUFFIXES)} are read")
    return np.asarray(ids, dtype=np.uint16 if vocab_size <= 2**16 else np.uint32)


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path}: {error}") from error


def _read_lines(path: Path) -> Iterator[str]:
    lines = _read_text(path).split("\n")  # within a string JSON may have other line ends
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            yield str(record["text"] if "text" in record else record["prompt"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'--text {path}:{number} has no "text" and no "prompt": {error}') from error
