"""Reads and writes `draft.json`, the description of an exported draft."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.common.errors import ModelError

FORMAT_VERSION = 4  # rises when the graph or this file changes
_CHAINS_ONLY = (
    3  # the version of graphs that lack `TREE_INPUTS` and return the row after the last token alone
)
DEFAULT_PRECISION = "int4"
_OPTIONAL = ("num_source_layers", "precision", "fallbacks")
SPEC_FILE = "draft.json"
GRAPH_FILE = "draft.onnx"
WEIGHTS_FILE = "draft.onnx.data"  # only beside graphs too large for one file
DROPOUT_FILE = "draft.dropout.onnx"  # the graph with a branch for MC dropout; its weights are the others'
TOKENIZER_FILE = "tokenizer.json"
ROW_OUTPUTS = ("logits", "probs", "tempered_logits", "tempered_probs")  # of the graph, each [k, num_tokens]
POSITION_IDS, ATTENTION_BIAS, ROWS = TREE_INPUTS = ("position_ids", "attention_bias", "rows")
HIDDEN_STATES = (
    "model.norm.out"  # of the graph, [1, k, hidden_size]: what its head reads; older graphs lack it
)
HIDDEN = -1e4  # in `attention_bias`: a slot that a token does not see; exp(-1e4) is 0 in float32
DROPOUT_MASKS = "dropout_masks"  # input of the variant, [samples, 1, width]; its outputs beside the rows are
CANDIDATE_IDS = "candidate_ids"  # [candidates]
CANDIDATE_LOGITS = "candidate_logits"  # [samples, candidates]


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """Holds fields for the runtime, and some for people. `files` maps names to sizes in bytes."""

    architecture: str
    num_tokens: int
    max_context: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    num_parameters: int
    rope: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    tokenizer_fingerprint: str
    tokenizer_sha256: str  # of the file, so that an exchanged one is noticed without parsing it
    files: dict[str, int]
    format_version: int = FORMAT_VERSION
    num_source_layers: int | None = None  # of the model these layers are the first of; None: it has no more
    precision: str = DEFAULT_PRECISION  # of the matrices
    fallbacks: dict[str, str] = field(
        default_factory=dict
    )  # the source's tensors in another one, and in which

    @property
    def takes_trees(self) -> bool:
        """Returns whether the graph has `TREE_INPUTS`, so that the nodes of a tree share one run."""
        return self.format_version > _CHAINS_ONLY

    def write(self, directory: Path) -> None:
        """Writes `draft.json` into a directory."""
        content = dataclasses.asdict(self)
        for each in dataclasses.fields(self):  # what says nothing is left out, as releases before it wrote it
            if each.name in _OPTIONAL and content[each.name] in (None, DEFAULT_PRECISION, {}):
                del content[each.name]
        text = json.dumps(content, indent=2)
        (directory / SPEC_FILE).write_text(text + "\n", encoding="utf-8")


def read_spec(directory: Path) -> DraftSpec:
    """Returns the description of a draft directory, checked; the weights are not read.

    Raises `ModelError` naming what is missing, truncated, replaced or of another version.
    """
    path = directory / SPEC_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        hint = ""
        if (directory / "config.json").exists():
            hint = "; run `edge-client draft export` on it, or draft with --draft-backend torch"
        raise ModelError(f"{directory} is not an exported draft: it has no {SPEC_FILE}{hint}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version not in (_CHAINS_ONLY, FORMAT_VERSION):
        raise ModelError(
            f"{path} has format version {version}, this release reads {_CHAINS_ONLY} and {FORMAT_VERSION}: "
            "export it again"
        )
    try:
        spec = DraftSpec(**(raw | {"eos_token_ids": tuple(raw["eos_token_ids"])}))
    except (TypeError, KeyError) as error:
        raise ModelError(f"{path} is malformed: {error}") from error
    _check_files(directory, spec)
    return spec


def file_sha256(path: Path) -> str:
    """Returns a file's SHA-256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_files(directory: Path, spec: DraftSpec) -> None:
    for name, size in {GRAPH_FILE: 0, TOKENIZER_FILE: 0, **spec.files}.items():
        path = directory / name
        if not path.is_file():
            raise ModelError(f"{directory} has no {name}")
        found = path.stat().st_size
        if size and found != size:
            raise ModelError(
                f"{path} has {found} bytes where {SPEC_FILE} says {size}: truncated or exchanged"
            )
    if file_sha256(directory / TOKENIZER_FILE) != spec.tokenizer_sha256:
        raise ModelError(f"{directory}/{TOKENIZER_FILE} is not the tokenizer the draft was exported with")
