"""The bank's texts: what installed packages carry beside their code. Deterministic for one installation.

Files are taken by distribution, in an order that has nothing to do with their names, up to a share of each;
what repeats (licences do) is taken once. The last documents are held out: their beginnings are the prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import PurePath

from outrider.experiments.shared.prompts import Prompt
from outrider.training.data.corpus import CORPORA, Corpus, build_corpus, shingles, stated_licence
from outrider.training.data.prompts import make_prompts

_PIECE_CHARACTERS, _NUM_PIECES = 6000, 8  # of a file
_MAX_FOREIGN_SHARE = 0.02  # of characters that are not ASCII
_MIN_CHARACTERS = 400
_PROMPT_CHARACTERS = 300
_NUM_HELD_OUT = 40
_MAX_SEEN_SHARE = 0.4  # as of the embedded pair's corpus
_CODE_STDLIB_BYTES = 1_500_000
_NUM_USED_PROMPTS = 16  # of the embedded ones: the controller's constants were chosen on texts after these
_LEFT_OUT = ("nvidia", "cuda", "outrider")  # closed licences, and ourselves


@dataclass(frozen=True, slots=True)
class FileKind:
    """Says which files of a distribution are taken, and how many bytes of each distribution."""

    suffixes: frozenset[str]
    names: tuple[str, ...] = ()  # beginnings, whatever the suffix
    max_bytes: int = 150_000

    def takes(self, path: PurePath) -> bool:
        """Returns whether a file is of this kind."""
        return path.suffix in self.suffixes or path.name.startswith(self.names or ("\0",))


PROSE = FileKind(
    frozenset({".md", ".rst"}), ("METADATA", "LICENSE", "LICENCE", "COPYING", "NOTICE", "AUTHORS")
)
TABLES = FileKind(frozenset({".json", ".csv", ".afm", ".tab"}), max_bytes=300_000)


def _build_code() -> tuple[Corpus, list[Prompt]]:
    corpus = build_corpus(replace(CORPORA["small"], max_stdlib_bytes=_CODE_STDLIB_BYTES, packages={}))
    return corpus, make_prompts(corpus.held_out)[_NUM_USED_PROMPTS:]


def _build_files(kind: FileKind) -> tuple[Corpus, list[Prompt]]:
    documents, sources = list[tuple[str, str]](), dict[str, dict[str, object]]()
    seen: set[int] = set()
    for distribution in sorted(metadata.distributions(), key=lambda each: each.name.lower()):
        if distribution.name.startswith(_LEFT_OUT):
            continue
        num_bytes = 0
        for name, text in _pieces(distribution, kind):
            grams = shingles(text)
            if num_bytes + len(text) > kind.max_bytes or len(grams & seen) > _MAX_SEEN_SHARE * len(grams):
                continue
            seen |= grams
            num_bytes += len(text)
            documents.append((name, text))
        if num_bytes:
            stated = {"version": distribution.version, "licence": stated_licence(distribution.name)}
            sources[distribution.name] = {"bytes": num_bytes, **stated}
    documents.sort(key=lambda each: _shuffled(each[0]))
    held_out = dict(documents[-_NUM_HELD_OUT:])
    manifest: dict[str, object] = {
        "num_documents": len(documents),
        "sources": sources,
        "held_out": [*held_out],
    }
    train = [text for _, text in documents[:-_NUM_HELD_OUT]]
    prompts = [Prompt(name, _beginning(text)) for name, text in held_out.items()]
    return Corpus(train, [], held_out, manifest), prompts


KINDS: dict[str, Callable[[], tuple[Corpus, list[Prompt]]]] = {
    "code": _build_code,
    "prose": partial(_build_files, PROSE),
    "tables": partial(_build_files, TABLES),
}
"""What a target is trained and asked on: each builds a corpus, and prompts of what it holds out."""


def _pieces(distribution: metadata.Distribution, kind: FileKind) -> Iterator[tuple[str, str]]:
    paths = [path for path in distribution.files or () if kind.takes(path)]
    for path in sorted(paths, key=lambda each: _shuffled(str(each))):
        try:
            text = path.locate().read_text("utf-8")  # type: ignore[attr-defined]
        except (OSError, UnicodeDecodeError):
            continue
        text = text[: _NUM_PIECES * _PIECE_CHARACTERS].strip()
        for start in range(0, len(text), _PIECE_CHARACTERS):
            piece = text[start : start + _PIECE_CHARACTERS]
            num_foreign = sum(not character.isascii() for character in piece)
            if len(piece) >= _MIN_CHARACTERS and num_foreign <= _MAX_FOREIGN_SHARE * len(piece):
                yield f"{distribution.name}/{path}:{start}", piece + "\n"


def _beginning(text: str) -> str:
    """Returns the first lines, of about as many characters as a prompt has."""
    end = text.find("\n", _PROMPT_CHARACTERS)
    return text[: end + 1] if 0 <= end < 2 * _PROMPT_CHARACTERS else text[:_PROMPT_CHARACTERS]


def _shuffled(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
