"""The verifiers of a sweep: one process for each set of settings, started when first needed and kept."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider.cloud_verifier.security.dev_certs import DevCertificates, make_dev_certificates
from outrider.common.errors import OutriderError
from outrider.edge_client.drafting.backend import ONNX
from outrider.edge_client.drafting.registry import MODEL, has_draft_files
from outrider.experiments.shared.processes import VerifierProcess, start_server, start_verifier
from outrider.experiments.shared.verifier_metrics import memory_peaks, read_metrics
from outrider.experiments.sweep.config.cells import Cell
from outrider.experiments.sweep.config.schema import SweepConfig
from outrider.experiments.sweep.config.settings import serve_flags


class VerifierPool:
    """Starts and keeps the verifiers of a sweep."""

    def __init__(self, config: SweepConfig) -> None:
        self._config = config
        self._processes: dict[tuple[float, bool], VerifierProcess] = {}
        self._stack = contextlib.ExitStack()
        self._certificates: DevCertificates | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def address_for(self, cell: Cell) -> str:
        """Returns the HOST:PORT of a verifier with the cell's settings."""
        return self._config.verifier or self._process_for(cell).address

    def pid_for(self, cell: Cell) -> int | None:
        """Returns the verifier's process id; None for one that somebody else runs."""
        return None if self._config.verifier else self._process_for(cell).process.pid

    def memory_for(self, cell: Cell) -> dict[str, Any]:
        """Returns the verifier's `MemoryPeaks` so far; nothing for one that somebody else runs, and without an admin
        port."""
        url = "" if self._config.verifier else self._process_for(cell).admin_url
        return asdict(memory_peaks(read_metrics(url))) if url else {}

    def edge_settings(self, cell: Cell) -> dict[str, Any]:
        """Returns what an edge needs to be let in, beside the address."""
        if not cell.tls:
            return {}
        if self._config.verifier:
            return {"tls": True}
        # The link's address is not the verifier's: its certificate is for this name.
        return {"tls_ca": str(self._local_certificates().ca), "tls_server_name": "localhost"}

    def _process_for(self, cell: Cell) -> VerifierProcess:
        key = cell.min_forward_ms, cell.tls
        if key not in self._processes:
            try:
                self._processes[key] = self._start(*key)
            except RuntimeError as error:
                raise OutriderError(str(error)) from error
            self._stack.callback(self._processes[key].stop)
        if (status := self._processes[key].process.poll()) is not None:
            raise OutriderError(f"the verifier for {cell.id!r} ended by itself, with status {status}")
        return self._processes[key]

    def _local_certificates(self) -> DevCertificates:
        if self._certificates is None:
            directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-certs-"))
            self._certificates = make_dev_certificates(Path(directory))
        return self._certificates

    def _start(self, min_forward_ms: float, has_tls: bool) -> VerifierProcess:
        settings = {
            "log_level": "warning",
            "admin_listen": "127.0.0.1:0",
            **(self._config.serve or {}),
            "min_forward_ms": min_forward_ms,
        }
        if has_tls:
            certificate, key = self._local_certificates().server
            settings |= {"tls_cert": certificate, "tls_key": key}
        if self._config.is_synthetic:
            return _start_synthetic(self._config.synthetic or {}, serve_flags(settings))
        dirs = self._config.model_dirs
        # A verifier drafts with onnxruntime, and the edge perhaps not: its draft is then the edge's alone.
        if "draft" in dirs and has_draft_files(MODEL, Path(dirs["draft"]), ONNX):
            settings.setdefault("draft", dirs["draft"])
        target = Path(dirs["target"]) if "target" in dirs else None
        return start_verifier(*serve_flags(settings), target=target)


def _start_synthetic(description: Mapping[str, object], flags: Sequence[str]) -> VerifierProcess:
    from outrider.experiments.synthetic.pair import pair_from
    from outrider.experiments.synthetic.serve import serve_command

    return start_server(serve_command(pair_from(description), *flags))
