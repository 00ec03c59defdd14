"""Runs the INT4 draft in onnxruntime: one session over the weights, shared by every sequence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

from outrider.common.errors import ModelError, UsageError
from outrider.common.process.extras import needs_extra
from outrider.common.sampling.processors import check_sampling_params
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.learned.learner import Learner
from outrider.edge_client.drafting.onnx.runner import DropoutCost, measure_cost
from outrider.edge_client.drafting.onnx.sequence import OnnxDraftSequence
from outrider.edge_client.drafting.rows.dropout import DropoutPlan
from outrider.edge_client.drafting.spec import (
    DROPOUT_FILE,
    DROPOUT_MASKS,
    GRAPH_FILE,
    HIDDEN_STATES,
    ROW_OUTPUTS,
    TREE_INPUTS,
    DraftSpec,
    read_spec,
)


class OnnxDraftModel:
    """Implements `DraftModel`. Sequences may run in parallel threads; their runs release the interpreter
    lock."""

    def __init__(
        self, directory: Path, spec: DraftSpec, session: Any, dropout: DropoutPlan | None = None
    ) -> None:
        self.directory = directory
        self.spec = spec
        self.dropout = dropout  # of the variant that runs; None: the plain graph does
        self.num_tokens, self.max_context = spec.num_tokens, spec.max_context
        self.eos_token_ids = spec.eos_token_ids
        self.fingerprint, self.tokenizer_fingerprint = spec.fingerprint, spec.tokenizer_fingerprint
        self.signal_names = ("nll", "entropy", "margin", *(("variance",) if dropout else ()))
        self._session: Any = session
        self.learner: Learner | None = None  # of `learn`

    @classmethod
    def open(cls, directory: Path | str, *, threads: int = 1, has_variance: bool = False) -> Self:
        """Loads an exported draft, or with `has_variance` its variant that also measures the variance: the
        same draft, slower. Raises `ModelError` naming what is wrong with the directory, `UsageError` where it
        has no such variant."""
        directory = Path(directory)
        if threads < 1:
            raise UsageError(f"a draft needs at least one thread, not {threads}")
        if not directory.is_dir():
            raise ModelError(f"{directory} is not a directory")
        spec = read_spec(directory)
        if has_variance and not (directory / DROPOUT_FILE).is_file():
            raise UsageError(
                f"{directory} has no variant for MC dropout ({DROPOUT_FILE}): `edge-client draft add-dropout "
                f"{directory}` adds one, `edge-client draft export --mc-dropout` writes it with the draft"
            )
        path = directory / (DROPOUT_FILE if has_variance else GRAPH_FILE)
        session = _create_session(path, threads)
        _check_interface(session, spec, path, has_variance)
        return cls(directory, spec, session, _read_plan(session, spec, path) if has_variance else None)

    @property
    def runtime(self) -> str:
        """Returns what computes, and with which numbers."""
        size = f"{sum(self.spec.files.values()) / 1e6:.0f} MB"
        weights = f"{self.spec.precision.upper()} weights ({size})"
        return f"onnxruntime {import_onnxruntime().__version__} on cpu, {weights}, float32 KV"

    def dropout_cost(self) -> DropoutCost | None:
        """Returns the time that the variance adds to a token, measured now; None without it."""
        assert self._session is not None, "the draft is closed"
        return measure_cost(self._session, self.spec, self.dropout) if self.dropout else None

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> OnnxDraftSequence:
        """Returns a new, empty sequence. Raises `InvalidFieldError` for parameters out of range."""
        assert self._session is not None, "the draft is closed"
        check_sampling_params(sampling, self.num_tokens)
        return OnnxDraftSequence(
            self._session, self.spec, sampling, num_prompt_tokens, num_support, self.dropout, self.learner
        )

    def learn(self, directory: Path) -> Learner:
        """Lets a head learn, which is kept in a directory, and has all later sequences draft with it. Raises
        `ModelError` for a draft that an older release exported, `UsageError` for a directory that cannot be made."""
        names = {value.name for value in self._session.get_outputs()}
        if HIDDEN_STATES not in names:
            raise ModelError(
                f"{self.directory} cannot learn: its graph has no output {HIDDEN_STATES}; export it again: "
                "`edge-client draft export`"
            )
        self.learner = Learner(directory, self.fingerprint, self.num_tokens, self.spec.hidden_size)
        return self.learner

    def close(self) -> None:
        """Releases the weights; open sequences keep them alive until they are closed."""
        self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def import_onnxruntime() -> Any:
    """Returns onnxruntime, imported with its telemetry off: the Linux wheels read this variable at import."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    with needs_extra("edge", "drafting"):
        import onnxruntime
    return onnxruntime


def _create_session(path: Path, threads: int) -> Any:
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Waiting threads would spin between rounds, on a device that runs other things.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no base of their own
        reason = str(error).splitlines()[0]
        raise ModelError(f"{path} cannot be loaded, it is damaged or not a draft: {reason}") from error


def _check_interface(session: Any, spec: DraftSpec, path: Path, has_variance: bool) -> None:
    expected = {"input_ids", "seqlens_k", "total_sequence_length", "temperature"}
    expected |= {f"past_{kind}_{layer}" for kind in ("key", "value") for layer in range(spec.num_layers)}
    expected |= set(TREE_INPUTS) if spec.takes_trees else set()
    expected |= {DROPOUT_MASKS} if has_variance else set()
    shapes = {value.name: value.shape for value in session.get_inputs()}
    kv_ok = all(
        shape[1] == spec.num_kv_heads and shape[3] == spec.head_dim
        for name, shape in shapes.items()
        if name.startswith("past_") and len(shape) == 4
    )
    rows = {value.name: value.shape for value in session.get_outputs() if value.name in ROW_OUTPUTS}
    num_rows = "k" if spec.takes_trees else 1
    rows_ok = rows == {name: [num_rows, spec.num_tokens] for name in ROW_OUTPUTS}
    if set(shapes) != expected or not kv_ok or not rows_ok:
        raise ModelError(f"{path} does not match its draft.json")


def _read_plan(session: Any, spec: DraftSpec, path: Path) -> DropoutPlan:
    """Raises `ModelError` where the variant was made for another draft: it would read wrong weights."""
    facts = session.get_modelmeta().custom_metadata_map
    if facts.get("draft") != spec.fingerprint:
        raise ModelError(
            f"{path} was made for another draft: `edge-client draft add-dropout {path.parent}` makes it anew"
        )
    (width,) = (value.shape[2] for value in session.get_inputs() if value.name == DROPOUT_MASKS)
    return DropoutPlan(int(facts["samples"]), float(facts["rate"]), width, int(facts["candidates"]))
