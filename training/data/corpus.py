"""The corpus: Python source that every installation of Python and of our dependencies already has.

`build_corpus` finds the files, drops what is generated, tabular, foreign in style or repeated, keeps the
held-out modules (`outrider.training.data.heldout`) and their near-duplicates out of the training text, and cuts half of
the files into their top-level definitions, so that a document may begin at a function's head as the
benchmark prompts do.
"""

import ast
import hashlib
import json
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from outrider.training.data.functions import documented_functions
from outrider.training.data.heldout import HELD_OUT_PACKAGES, HELD_OUT_STDLIB
from outrider.training.data.source_filter import normalise, shingles, why_dropped

STDLIB = "cpython"
_STDLIB_SKIP = frozenset(
    "site-packages test tests idlelib lib2to3 encodings pydoc_data turtledemo ensurepip __pycache__".split()
)
_PACKAGE_SKIP = frozenset(
    "tests test testing _vendor vendored __pycache__ legacy pb _inductor _dynamo".split()
)


@dataclass(frozen=True)
class CorpusConfig:
    """Says what goes in. `packages` maps a directory below site-packages to the most bytes taken from it."""

    max_stdlib_bytes: int = 12_000_000
    packages: dict[str, int] = field(
        default_factory=lambda: {
            "networkx": 2_500_000,
            "torch": 1_500_000,
            "transformers": 1_500_000,
            "huggingface_hub": 1_000_000,
            "hypothesis": 900_000,
            "numpy": 900_000,
            "rich": 900_000,
            "_pytest": 800_000,
            "sympy": 800_000,
            "mpmath": 700_000,
            "mypy": 600_000,
            "click": 400_000,
            "fsspec": 400_000,
            "jinja2": 400_000,
            "onnxruntime": 400_000,
            "packaging": 400_000,
            "pydantic": 400_000,
            "setuptools": 400_000,
            "google": 300_000,
            "grpc": 300_000,
            "onnx": 300_000,
            "tokenizers": 100_000,
            "tqdm": 200_000,
            "typer": 300_000,
            "yaml": 200_000,
            "safetensors": 100_000,
            "markdown_it": 200_000,
            "anyio": 300_000,
        }
    )
    min_file_bytes: int = 400
    max_file_bytes: int = 150_000
    max_seen_share: float = 0.4
    """A file is a near-duplicate when more than this share of its 8-token shingles was seen before."""
    max_heldout_share: float = 0.1
    """The same towards the held-out text; stricter, because it guards the figures."""
    split_share: float = 0.5
    """Share of the files that are cut into their top-level definitions."""
    seed: int = 0


_LARGE_SHARES = {
    "torch": 24_000_000,
    "transformers": 24_000_000,
    "sympy": 10_000_000,
    "scipy": 6_000_000,
    "networkx": 6_000_000,
    "mypy": 4_000_000,
    "onnxruntime": 4_000_000,
    "onnx": 3_000_000,
    "pygments": 3_000_000,
}
"""Of the large corpus; what is not named may give 3 MB."""

CORPORA = {
    "small": CorpusConfig(),
    "large": CorpusConfig(
        packages=dict.fromkeys(CorpusConfig().packages, 3_000_000) | _LARGE_SHARES,
        max_file_bytes=300_000,
    ),
}
"""`small` keeps a balance that a few million tokens see once; `large` is for many passes, on a GPU. Both
follow one rule of what is dropped, and hold out the same modules.
"""


@dataclass(frozen=True)
class Corpus:
    """Holds documents (each one string), and a manifest of where they come from."""

    train: list[str]
    functions: list[str]
    """Those of the training text that have a docstring, once more and each by itself."""
    held_out: dict[str, str]
    manifest: dict[str, object]


def build_corpus(config: CorpusConfig = CorpusConfig()) -> Corpus:
    """Read, filter, deduplicate and order the corpus. Deterministic for one installation and seed."""
    paths = {key: sysconfig.get_paths()[key] for key in ("stdlib", "purelib")}
    stdlib, site = Path(paths["stdlib"]), Path(paths["purelib"])
    held_out = read_held_out(stdlib, site)
    heldout_shingles = {shingle for text in held_out.values() for shingle in shingles(text)}
    seen: set[int] = set()
    dropped: Counter[str] = Counter()
    texts: list[str] = []
    sources: dict[str, dict[str, object]] = {}
    for package, root, cap in _sources(config, stdlib, site):
        num_files = num_bytes = 0
        for path in _files(package, root):
            if path.relative_to(stdlib if package == STDLIB else site).as_posix() in _held_out_names(package):
                continue
            raw, reason = _read(path, config)
            text = normalise(raw)
            if reason is None and num_bytes + len(text) > cap:
                reason = "over the package's share"
            reason = reason or why_dropped(path, raw, text)
            grams = shingles(text) if reason is None else set()
            reason = reason or _repeated(grams, seen, heldout_shingles, config)
            if reason is not None:
                dropped[reason] += 1
                continue
            seen |= grams
            texts.append(text)
            num_files, num_bytes = num_files + 1, num_bytes + len(text.encode())
        if num_files:
            sources[package] = {"files": num_files, "bytes": num_bytes, **_licence(package)}
    documents = _documents(texts, config)
    functions = [function.text for text in texts for function in documented_functions(text)]
    manifest: dict[str, object] = {
        "config": asdict(config),
        "num_documents": len(documents),
        "num_functions": len(functions),
        "num_bytes": sum(len(text.encode()) for text in documents),
        "sources": sources,
        "dropped": dict(dropped.most_common()),
        "held_out": {name: len(text.encode()) for name, text in held_out.items()},
    }
    return Corpus(documents, functions, held_out, manifest)


def read_held_out(stdlib: Path, site: Path) -> dict[str, str]:
    """Reads the held-out files by name."""
    paths = {f"{name}.py": stdlib / f"{name}.py" for name in HELD_OUT_STDLIB}
    paths |= {name: site / name for name in HELD_OUT_PACKAGES}
    return {name: normalise(path.read_text("utf-8")) for name, path in paths.items() if path.is_file()}


def _held_out_names(package: str) -> frozenset[str]:
    return (
        frozenset(f"{name}.py" for name in HELD_OUT_STDLIB)
        if package == STDLIB
        else frozenset(HELD_OUT_PACKAGES)
    )


def _sources(config: CorpusConfig, stdlib: Path, site: Path) -> Iterator[tuple[str, Path, int]]:
    yield STDLIB, stdlib, config.max_stdlib_bytes
    for name, cap in config.packages.items():
        if (site / name).is_dir():
            yield name, site / name, cap


def _files(package: str, root: Path) -> list[Path]:
    """Returns files in an order that is fixed and has nothing to do with their names, so that a cap takes
    a fair sample."""
    skip = _STDLIB_SKIP if package == STDLIB else _PACKAGE_SKIP
    files = [path for path in root.rglob("*.py") if not skip.intersection(path.relative_to(root).parts[:-1])]
    return sorted(files, key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())


def _read(path: Path, config: CorpusConfig) -> tuple[str, str | None]:
    try:
        raw = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return "", "not utf-8"
    fits = config.min_file_bytes <= len(raw) <= config.max_file_bytes
    return raw, None if fits else "too short or too long"


def _repeated(grams: set[int], seen: set[int], heldout: set[int], config: CorpusConfig) -> str | None:
    total = max(1, len(grams))
    if len(grams & heldout) / total > config.max_heldout_share:
        return "near-duplicate of a held-out module"
    if len(grams & seen) / total > config.max_seen_share:
        return "near-duplicate"
    return None


def _documents(texts: list[str], config: CorpusConfig) -> list[str]:
    rng = random.Random(config.seed)
    documents: list[str] = []
    for text in texts:
        documents.extend(_definitions(text) if rng.random() < config.split_share else [text])
    rng.shuffle(documents)
    return documents


def _definitions(text: str) -> list[str]:
    """Cuts one module into its functions and classes; what is between them is one document more."""
    lines = text.splitlines(keepends=True)
    pieces: list[str] = []
    rest: list[str] = []
    start = 0
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = min([node.lineno, *(item.lineno for item in node.decorator_list)]) - 1
        rest.extend(lines[start:first])
        start = node.end_lineno or first
        pieces.append("".join(lines[first:start]))
    rest.extend(lines[start:])
    return [piece for piece in ["".join(rest).strip("\n") + "\n", *pieces] if len(piece) > 80]


def _licence(package: str) -> dict[str, object]:
    import platform
    from importlib import metadata

    if package == STDLIB:
        return {"distribution": "CPython", "version": platform.python_version(), "licence": "PSF-2.0"}
    names = sorted(set(metadata.packages_distributions().get(package, ())))
    if not names:
        return {"distribution": package, "version": "?", "licence": "unknown"}
    return {
        "distribution": ", ".join(names),
        "version": ", ".join(map(metadata.version, names)),
        "licence": ", ".join(map(_stated_licence, names)),
    }


def _stated_licence(distribution: str) -> str:
    from importlib import metadata

    meta = metadata.metadata(distribution)
    classifiers = [
        line.rsplit("::", 1)[-1].strip() for line in meta.get_all("Classifier") or [] if "License" in line
    ]
    stated = [(meta.get_all(key) or [""])[0] for key in ("License-Expression", "License")]
    return stated[0] or "; ".join(classifiers) or stated[1][:60] or "unknown"


def save_manifest(corpus: Corpus, path: Path) -> None:
    """Write the manifest as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(corpus.manifest, indent=1) + "\n")
