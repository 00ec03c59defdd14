"""One edge as a process: `python -m outrider.experiments.sweep.worker`, a JSON line per job in, one per answer out.

A process an edge, because edges are machines of their own: threads of one interpreter would wait for each
other's turn, and their peak memory could not be told apart. Jobs:

    {"op": "run", "settings": {...}, "errand": {...}, "text": "...", "synthetic": {...} | null, "prior": "..."}
                                               -> {"request": {...}, "rounds": [...], "stretches": [...]}
    {"op": "check", "settings": {...}, "text": "...", "synthetic": {...} | null}                      -> {}
    {"op": "reset_peak"}                                              -> {}
    {"op": "peak"}                                                    -> {"peak_rss_bytes": ...}

Requests that name the same `prior` begin with the acceptance that earlier ones saw, and with the texts that a draft
of copies keeps of them; without one, each begins as a process's first does. `check` loads what the settings name and
makes a session of them, which asks nobody.
A mistake of the user's is {"usage_error": "..."}; a bug ends the process, its traceback on stderr.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from outrider.common.errors import OutriderError
from outrider.common.process.logs import setup_logging
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.controller.acceptance_prior import AcceptancePrior
from outrider.edge_client.drafting.base import ServesOwners
from outrider.edge_client.session.factory import Edge, create_edge
from outrider.experiments.sweep.config.settings import make_edge_config
from outrider.experiments.sweep.machine import peak_rss_bytes, reset_peak_rss
from outrider.experiments.sweep.observing import Errand, observe
from outrider.experiments.sweep.results.records import to_json


class _Edges:
    """Keeps edges by what they load: the same weights serve every cell that uses them."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[object, ...], Edge] = {}
        self._priors: dict[str, AcceptancePrior] = {}
        self._numbers = itertools.count()

    def get(self, config: RunConfig, synthetic: Mapping[str, object] | None, prior: str = "") -> Edge:
        weights = _loaded_by(config) if config.mode.has_draft else ()
        key = (config.draft.directory, json.dumps(synthetic), *weights)
        if key not in self._loaded:
            is_real = synthetic is None
            self._loaded[key] = create_edge(config) if is_real else _create_synthetic(config, synthetic or {})
        # What a cell's text teaches is not for the next cell: a figure must not depend on what ran before it.
        known = self._priors.setdefault(prior, AcceptancePrior()) if prior else AcceptancePrior()
        edge = self._loaded[key]
        draft = edge.draft
        if isinstance(draft, ServesOwners):
            draft = draft.of_owner(prior or f"request {next(self._numbers)}")
        return dataclasses.replace(edge, config=config, draft=draft, acceptance_prior=known)


def _loaded_by(config: RunConfig) -> tuple[object, ...]:
    draft = dataclasses.replace(config.draft, directory="")
    return (draft, config.gate.variance is not None, config.gate.file)


def _create_synthetic(config: RunConfig, description: Mapping[str, object]) -> Edge:
    from outrider.experiments.synthetic.draft import create_synthetic_edge
    from outrider.experiments.synthetic.pair import pair_from

    return create_synthetic_edge(config, pair_from(description))


def run(edges: _Edges, job: dict[str, Any]) -> dict[str, Any]:
    """Runs one request; returns its rows, and which modes made its text."""
    config = make_edge_config(job["settings"])
    setup_logging(config.logs.level)
    errand = Errand(**job["errand"])
    edge = edges.get(config, job.get("synthetic"), job.get("prior", ""))
    num_prompt_tokens = len(edge.tokenizer.encode(job["text"]))
    session = edge.session(job["text"], errand.seed)
    request, rounds = observe(session, errand, num_prompt_tokens)
    fingerprint = edge.draft.fingerprint if edge.draft is not None else ""
    request = dataclasses.replace(request, draft_fingerprint=fingerprint)
    stretches = [dataclasses.asdict(each) for each in session.result.stats.stretches]
    return {"request": to_json(request), "rounds": [to_json(row) for row in rounds], "stretches": stretches}


def check(edges: _Edges, job: dict[str, Any]) -> dict[str, Any]:
    """Makes a session of the settings, which asks nobody."""
    config = make_edge_config(job["settings"])
    edges.get(config, job.get("synthetic")).session(job["text"], seed=0)
    return {}


def serve(lines: TextIO, answers: TextIO) -> None:
    """Answers jobs until the end of the input."""
    edges = _Edges()
    operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "run": lambda job: run(edges, job),
        "check": lambda job: check(edges, job),
        "reset_peak": lambda job: {"is_reset": reset_peak_rss(os.getpid())},
        "peak": lambda job: {"peak_rss_bytes": peak_rss_bytes(os.getpid())},
    }
    for line in lines:
        job = json.loads(line)
        try:
            answer = operations[job["op"]](job)
        except OutriderError as error:
            answer = {"usage_error": str(error)}
        print(json.dumps(answer, allow_nan=False), file=answers, flush=True)


def main() -> None:
    """Runs the command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
