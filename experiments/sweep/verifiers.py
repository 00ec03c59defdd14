"""The verifiers of a sweep: one process for each set of settings, started when first needed and kept."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from experiments.processes import VerifierProcess, start_server, start_verifier
from experiments.sweep.cells import Cell
from experiments.sweep.config import SweepConfig
from experiments.sweep.settings import serve_flags


class VerifierPool:
    def __init__(self, config: SweepConfig) -> None:
        self._config = config
        self._processes: dict[float, VerifierProcess] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def address_for(self, cell: Cell) -> str:
        """HOST:PORT of a verifier with the cell's settings."""
        return self._config.verifier or self._process_for(cell).address

    def pid_for(self, cell: Cell) -> int | None:
        """None for a verifier that somebody else runs."""
        return None if self._config.verifier else self._process_for(cell).process.pid

    def _process_for(self, cell: Cell) -> VerifierProcess:
        key = cell.min_forward_ms
        if key not in self._processes:
            self._processes[key] = self._start(key)
            self._stack.callback(self._processes[key].stop)
        return self._processes[key]

    def _start(self, min_forward_ms: float) -> VerifierProcess:
        settings = {"log_level": "warning", **(self._config.serve or {}), "min_forward_ms": min_forward_ms}
        if self._config.is_synthetic:
            return _start_synthetic(self._config.synthetic or {}, serve_flags(settings))
        dirs = self._config.model_dirs
        if "draft" in dirs:
            settings.setdefault("draft", dirs["draft"])
        target = Path(dirs["target"]) if "target" in dirs else None
        return start_verifier(*serve_flags(settings), target=target)


def _start_synthetic(description: Mapping[str, object], flags: Sequence[str]) -> VerifierProcess:
    from experiments.synthetic.pair import pair_from
    from experiments.synthetic.serve import serve_command

    return start_server(serve_command(pair_from(description), *flags))
