"""Fingerprints of tokenizers and models: equal content, equal string, wherever it is stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from outrider.common.errors import ModelError

_CHUNK_BYTES = 1 << 20


def tokenizer_fingerprint(tokenizer_json: Path) -> str:
    """Returns the hex SHA-256 of how a `tokenizer.json` maps text to ids.

    It covers the table of (id, token, special) sorted by id, added tokens included; the merges (for a unigram
    model its scores); the normaliser; the pre-tokeniser. Raises ModelError when the file is missing or is not
    a tokenizer.
    """
    content = _read(tokenizer_json)
    model = content["model"]
    parts = {
        "tokens": [[token_id, *entry] for token_id, entry in sorted(_table(content).items())],
        "merges": _merges(model),
        "normalizer": content.get("normalizer"),
        "pre_tokenizer": content.get("pre_tokenizer"),
    }
    canonical = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def num_tokens(tokenizer_json: Path) -> int:
    """Returns the highest token id plus one; ids at or above it do not exist. Raises ModelError as above."""
    return max(_table(_read(tokenizer_json)), default=-1) + 1


def num_embedded_tokens(tokenizer_json: Path, num_rows: int) -> int:
    """Returns as above the ids that a model with `num_rows` embeddings has.

    Special tokens may lie beyond them, for other models of the family: Gemma 3's 1B has no images. Raises `ModelError`
    where others do.
    """
    table = _table(_read(tokenizer_json))
    count = max(table, default=-1) + 1
    if any(token_id >= num_rows and not is_special for token_id, (_, is_special) in table.items()):
        raise ModelError(f"{tokenizer_json} has {count} tokens, but the embedding only {num_rows} rows")
    return min(count, num_rows)


def target_fingerprint(directory: Path) -> str:
    """Returns the fingerprint of a model directory's configuration and weights. Raises ModelError as below."""
    return directory_fingerprint([directory / "config.json", *directory.glob("*.safetensors")])


def served_fingerprint(fingerprint: str, changes: Sequence[str]) -> str:
    """Returns the fingerprint of a target that is served otherwise than in float32, as `changes` say ("kv=fp8"): its
    text is another. Without changes it is that of the directory."""
    if not changes:
        return fingerprint
    return hashlib.sha256("\n".join((fingerprint, *sorted(changes))).encode()).hexdigest()


def directory_fingerprint(paths: Iterable[Path]) -> str:
    """Returns the hex SHA-256 of some files' names and content, in the order of their names.

    Raises ModelError when one cannot be read.
    """
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        total.update(f"{path.name}\0{_file_sha256(path)}\n".encode())
    return total.hexdigest()


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()


def _read(tokenizer_json: Path) -> dict[str, Any]:
    try:
        content = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read the tokenizer {tokenizer_json}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{tokenizer_json} is not JSON: {error}") from error
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise ModelError(f"{tokenizer_json} is not a tokenizer: it has no model with a vocabulary")
    assert isinstance(content, dict)
    return content


def _table(content: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    vocab = content["model"]["vocab"]
    try:
        if isinstance(vocab, dict):
            table = {int(token_id): (str(token), False) for token, token_id in vocab.items()}
        else:  # a unigram model lists [token, score]
            table = {token_id: (str(piece[0]), False) for token_id, piece in enumerate(vocab)}
        for added in content.get("added_tokens") or ():
            table[int(added["id"])] = (str(added["content"]), bool(added.get("special", False)))
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ModelError(f"the tokenizer's vocabulary is malformed: {error!r}") from error
    return table


def _merges(model: dict[str, Any]) -> list[Any]:
    if isinstance(model["vocab"], list):
        return [piece[1] for piece in model["vocab"]]
    merges = model.get("merges") or []
    return [merge.split(" ", 1) if isinstance(merge, str) else list(merge) for merge in merges]


def read_shard_names(index: Path) -> list[str]:
    """Returns the sorted names in a `model.safetensors.index.json`.

    Raises ModelError for a file that is no index, and for a name that is not of a safetensors file beside it:
    loading what such an index lists could unpickle, or read elsewhere.
    """
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index") from error
    for name in names:
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise ModelError(f"{index} names {name!r}, which is no safetensors file beside it")
    return names
