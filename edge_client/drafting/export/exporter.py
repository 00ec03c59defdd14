"""Exports a Hugging Face decoder directory to the ONNX form that the edge drafts with."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.common.errors import ModelError, UsageError
from outrider.common.models.fingerprint import (
    directory_fingerprint,
    num_embedded_tokens,
    tokenizer_fingerprint,
)
from outrider.common.process.extras import needs_extra
from outrider.edge_client.drafting import spec as files
from outrider.edge_client.drafting.export.graph import GraphBuilder
from outrider.edge_client.drafting.export.hf_config import DecoderConfig, read_config
from outrider.edge_client.drafting.export.precision import INT4
from outrider.edge_client.drafting.export.safetensors_dir import TensorDirectory
from outrider.edge_client.drafting.export.weights import DecoderWeights
from outrider.edge_client.drafting.export.writer import INT8_ACTIVATIONS
from outrider.edge_client.drafting.spec import DraftSpec
from outrider.edge_client.tokenization.chat_template import CONFIG_FILE, TEMPLATE_FILE, TOOL_TEMPLATE_FILE

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what is being done

MAX_CONTEXT = 32_768  # longer ones cost 2 · head_dim bytes a position and weigh on nothing we draft
_MAX_INLINE_BYTES = 256 << 20  # larger weights go beside the graph, so that loading maps them


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Describes what was written."""

    out_dir: Path
    architecture: str
    num_layers: int
    num_source_layers: int | None  # of the model, where only the first `num_layers` were taken
    num_parameters: int
    num_bytes: int  # of everything written
    files: tuple[str, ...]
    max_context: int
    fingerprint: str
    tokenizer_fingerprint: str
    precision: str
    fallbacks: Mapping[str, str]  # tensors in another precision, and in which


@dataclass(frozen=True, slots=True)
class Source:
    """Holds a Hugging Face directory that was looked at and can be exported."""

    hf_dir: Path
    config: DecoderConfig  # of the layers that are taken
    num_layers: int  # of the model
    num_tokens: int  # of its tokenizer
    context: int

    def build(
        self,
        precision: str,
        *,
        accuracy_level: int = INT8_ACTIVATIONS,
        progress: Progress | None = None,
    ) -> BuiltGraph:
        """Returns the graph in a precision. Raises `ModelError` for weights that are missing or misshapen."""
        tensors = TensorDirectory(self.hf_dir)
        builder = GraphBuilder(
            self.config,
            DecoderWeights(self.config, tensors),
            num_tokens=self.num_tokens,
            context=self.context,
            precision=precision,
            accuracy_level=accuracy_level,
        )
        model = builder.build(progress or _silent)
        return BuiltGraph(model, precision, builder.fallbacks, tensors.num_parameters_read)


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """Holds an `onnx.ModelProto` with its weights."""

    model: Any
    precision: str
    fallbacks: Mapping[str, str]
    num_parameters: int

    @property
    def num_bytes(self) -> int:
        """Returns the size of its constants in bytes."""
        return sum(len(constant.raw_data) for constant in self.model.graph.initializer)


def read_source(hf_dir: Path, *, max_context: int | None = None, first_layers: int | None = None) -> Source:
    """Returns what can be exported of a directory. Needs the `export` extra. Raises `ModelError` for a directory that
    is not a safetensors model of a supported architecture with its tokenizer.json, `UsageError` for more layers than
    it has and for a context below two tokens."""
    if max_context is not None and max_context < 2:
        raise UsageError(f"--max-context {max_context}: want 2 tokens or more")
    _require_onnx()
    _refuse_gguf(hf_dir)
    if not hf_dir.is_dir():
        raise ModelError(f"{hf_dir} is not a directory")
    whole = read_config(hf_dir)
    config = _truncate(whole, first_layers, hf_dir)
    tokenizer = hf_dir / files.TOKENIZER_FILE
    if not tokenizer.is_file():
        raise ModelError(f"{hf_dir} has no {files.TOKENIZER_FILE}")
    count = num_embedded_tokens(tokenizer, config.vocab_size)
    context = min(config.max_context, MAX_CONTEXT if max_context is None else max_context)
    return Source(hf_dir, config, whole.num_layers, count, context)


def export_draft(
    hf_dir: Path,
    out_dir: Path,
    *,
    max_context: int | None = None,
    first_layers: int | None = None,
    precision: str = INT4,
    accuracy_level: int = INT8_ACTIVATIONS,
    progress: Progress | None = None,
) -> ExportReport:
    """Writes `draft.onnx`, `draft.json` and `tokenizer.json` into `out_dir`, made if missing.

    The context is the model's own, 32,768 or `max_context` at most. `first_layers` keeps that many decoder
    layers, with the model's own final norm and head after them. `precision` is one of `precision.PRECISIONS`;
    `accuracy_level` is MatMulNBits': 4 rounds activations to int8, 1 keeps them float32 and is two to four times
    slower. Needs the `export` extra, not torch. Raises `ModelError` and `UsageError` as `read_source` does.
    """
    source = read_source(Path(hf_dir), max_context=max_context, first_layers=first_layers)
    graph = source.build(precision, accuracy_level=accuracy_level, progress=progress)
    return write_draft(source, graph, Path(out_dir))


def write_draft(source: Source, graph: BuiltGraph, out_dir: Path) -> ExportReport:
    """Writes a graph, its description and its tokenizer. Raises `ModelError` where that fails."""
    tokenizer = source.hf_dir / files.TOKENIZER_FILE
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        _save(graph, out_dir)
        if tokenizer.resolve() != (out_dir / files.TOKENIZER_FILE).resolve():
            shutil.copyfile(tokenizer, out_dir / files.TOKENIZER_FILE)
            _copy_chat_template(source.hf_dir, out_dir)
        spec = _write_spec(out_dir, source, graph)
    except OSError as error:
        raise ModelError(f"cannot write to {out_dir}: {error.strerror or error}") from error
    return _report(out_dir, spec)


def _refuse_gguf(path: Path) -> None:
    """Raises `ModelError` for a GGUF file, or a directory with nothing else to read."""
    found = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if found and not any(path.glob("*.safetensors*")):
        raise ModelError(
            f"{found[0]} is GGUF, whose weights are quantised already; export reads the original safetensors: download "
            "the repository that it was converted from (its model card names it; `hf download OWNER/MODEL --local-dir "
            "DIR`), and export DIR"
        )


def _truncate(config: DecoderConfig, first_layers: int | None, hf_dir: Path) -> DecoderConfig:
    if first_layers is None:
        return config
    if not 1 <= first_layers <= config.num_layers:
        raise UsageError(f"--first-layers {first_layers}: {hf_dir} has layers 1 to {config.num_layers}")
    return replace(config, num_layers=first_layers)


def _silent(_done: int, _total: int, _what: str) -> None:
    pass


def _require_onnx() -> None:
    with needs_extra("export", "draft export"):
        import onnx  # noqa: F401


def _save(graph: BuiltGraph, out_dir: Path) -> None:
    import onnx

    model = graph.model
    weights = out_dir / files.WEIGHTS_FILE
    weights.unlink(missing_ok=True)  # onnx would append
    (out_dir / files.DROPOUT_FILE).unlink(missing_ok=True)  # of the draft that was here
    if graph.num_bytes > _MAX_INLINE_BYTES:
        onnx.save(model, out_dir / files.GRAPH_FILE, save_as_external_data=True, location=weights.name)
    else:
        onnx.save(model, out_dir / files.GRAPH_FILE)


def _write_spec(out_dir: Path, source: Source, graph: BuiltGraph) -> DraftSpec:
    config = source.config
    names = [files.GRAPH_FILE, files.WEIGHTS_FILE, files.TOKENIZER_FILE]
    written = [out_dir / name for name in names if (out_dir / name).exists()]
    spec = DraftSpec(
        architecture=config.architecture,
        num_tokens=source.num_tokens,
        max_context=source.context,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.padded_head_dim,
        hidden_size=config.hidden_size,
        num_parameters=graph.num_parameters,
        rope=dict(config.rope),
        eos_token_ids=config.eos_token_ids,
        fingerprint=directory_fingerprint(written),
        tokenizer_fingerprint=tokenizer_fingerprint(out_dir / files.TOKENIZER_FILE),
        tokenizer_sha256=files.file_sha256(out_dir / files.TOKENIZER_FILE),
        files={path.name: path.stat().st_size for path in written},
        num_source_layers=source.num_layers if config.num_layers < source.num_layers else None,
        precision=graph.precision,
        fallbacks=dict(graph.fallbacks),
    )
    spec.write(out_dir)
    return spec


def _copy_chat_template(hf_dir: Path, out_dir: Path) -> None:
    """Copies the chat template for `edge-client chat` and `serve`, in place of that of a draft that was here; it is no
    part of the draft's fingerprint."""
    for name in (TEMPLATE_FILE, TOOL_TEMPLATE_FILE, CONFIG_FILE):
        if (hf_dir / name).is_file():
            (out_dir / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(hf_dir / name, out_dir / name)
        else:
            (out_dir / name).unlink(missing_ok=True)


def _report(out_dir: Path, spec: DraftSpec) -> ExportReport:
    return ExportReport(
        out_dir=out_dir,
        architecture=spec.architecture,
        num_layers=spec.num_layers,
        num_source_layers=spec.num_source_layers,
        num_parameters=spec.num_parameters,
        num_bytes=sum(spec.files.values()) + (out_dir / files.SPEC_FILE).stat().st_size,
        files=(files.SPEC_FILE, *spec.files),
        max_context=spec.max_context,
        fingerprint=spec.fingerprint,
        tokenizer_fingerprint=spec.tokenizer_fingerprint,
        precision=spec.precision,
        fallbacks=spec.fallbacks,
    )
