"""Reports before anything runs what a run would refuse, by asking the product about every cell."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from outrider.common.errors import LinkError, UsageError
from outrider.edge_client.session.factory import create_link
from outrider.edge_client.session.session import new_session_id
from outrider.experiments.sweep.config.cells import Cell
from outrider.experiments.sweep.config.schema import SweepConfig
from outrider.experiments.sweep.config.settings import make_edge_config
from outrider.experiments.sweep.edges import EdgePool
from outrider.experiments.sweep.running import Plan

_ANSWER_S = 5.0


def check_cells(plan: Plan) -> None:
    """Has an edge's own process load what each cell names and make a session of its settings. Raises
    `UsageError` naming the first cell that the product does not take."""
    config, known = plan.config, set[str]()
    with EdgePool(Path(os.devnull)) as edges:
        [edge] = edges.take(1)
        for cell in plan.cells:
            job: dict[str, Any] = {
                "op": "check",
                "settings": cell.run_settings(config) | _own_verifier(config, cell),
                "text": plan.prompts[0].text,
                "synthetic": (config.synthetic or {}) if config.is_synthetic else None,
            }
            if (text := json.dumps(job, default=str)) in known:  # another link changes nothing here
                continue
            known.add(text)
            try:
                edge.ask(job)
            except UsageError as error:
                hint = f"; `baselines` without {cell.baseline} leaves it out" if cell.baseline else ""
                raise UsageError(f"cell {cell.id!r}: {error}{hint}") from error


def check_verifier(plan: Plan) -> None:
    """Raises `LinkError` within seconds where the verifier that the sweep names does not answer."""
    asking = [cell for cell in plan.cells if cell.has_link]
    if not plan.config.verifier or not asking:
        return
    settings = asking[0].run_settings(plan.config) | _own_verifier(plan.config, asking[0])
    try:
        create_link(make_edge_config(settings), new_session_id()).describe(_ANSWER_S)
    except LinkError as error:
        raise LinkError(f"verifier: {error}") from error


def _own_verifier(config: SweepConfig, cell: Cell) -> dict[str, Any]:
    if not config.verifier:
        return {}
    return {"verifier": config.verifier} | ({"tls": True} if cell.tls else {})
