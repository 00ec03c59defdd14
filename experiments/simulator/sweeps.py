"""A sweep of `edge-client bench` in virtual time: its cells, prompts, seeds and repeats.

The embedded pair's acceptance is the recorded one of the same prompts, a synthetic pair's is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.common.config.loader import load_config
from outrider.common.errors import UsageError
from outrider.edge_client.drafting.registry import MODEL
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.simulator.config import (
    EdgeGroup,
    EdgePlan,
    System,
    SystemConfig,
    VerifierGroup,
    VerifierPlan,
)
from outrider.experiments.simulator.figures.folder import Recorder, finish, make_manifest, visit_of
from outrider.experiments.simulator.parts.drafts import TracedText, load_acceptance
from outrider.experiments.simulator.parts.edges import Ask, RequestLog
from outrider.experiments.simulator.parts.times import DEFAULT_TIMES, SystemTimes, load_times
from outrider.experiments.simulator.run import play
from outrider.experiments.sweep.config.cells import Cell
from outrider.experiments.sweep.config.checks import check_sweep
from outrider.experiments.sweep.config.schema import SIMULATED, SweepConfig, resolved
from outrider.experiments.sweep.config.settings import make_edge_config
from outrider.experiments.sweep.linking import calibrate_links
from outrider.experiments.sweep.results.folder import create_folder
from outrider.experiments.sweep.results.records import Sweep
from outrider.experiments.sweep.running import Plan, make_plan
from outrider.experiments.synthetic.pair import pair_from
from outrider.models import EMBEDDED

LONGEST_S = 3600.0  # of virtual time, for one visit


def play_sweep(
    config: SweepConfig, out: Path, only: Sequence[str] = (), program: str = "edge-client"
) -> Sweep:
    """Plays a sweep, whatever its realisation; `only` as in `make_plan`, `program` is whose arguments the
    manifest gives. Raises `UsageError` for a sweep that cannot be simulated, or a folder that cannot be
    used."""
    config = replace(config, realisation=SIMULATED)
    check_sweep(config)
    plan = make_plan(config, only)
    _check_recorded(plan)
    content = resolved(config) | {"cells": [cell.id for cell in plan.cells]}
    folder = create_folder(out, make_manifest(config.name, content, config.seed, program), is_resumable=False)
    if config.calibrate:
        folder.update_manifest(calibration=calibrate_links(SIMULATED, config.profiles))
    prompt_tokens = [_num_tokens(each.text) for each in plan.prompts]
    stage = _Stage(plan, _adapted(load_times(DEFAULT_TIMES), config), prompt_tokens)
    for repeat, cell in plan.visits():
        recorder = Recorder(folder, [cell] * cell.num_sessions, repeat, config.seed + repeat)
        for asks in _waves(stage.asks(cell, repeat), has_outages=bool(cell.link.outages)):
            logs: list[RequestLog] = []
            play(
                stage.system(cell, repeat),
                follow_session=recorder.follow,
                on_request=logs.append,
                asks=asks,
                traces=stage.traces(cell),
            )
            folder.add_visit(visit_of(cell, repeat, logs))
    return finish(folder, config, plan.cells)


def _check_recorded(plan: Plan) -> None:
    """Raises `UsageError` for drafts and prompts whose acceptance was not recorded."""
    config = plan.config
    if config.model_dirs:
        raise UsageError(
            "models: a sweep in virtual time has recordings of the embedded pair alone, or synthetic ones"
        )
    if config.prompts and not config.is_synthetic:
        raise UsageError(
            "prompts: a sweep in virtual time plays recordings of the embedded prompts: leave it out"
        )
    for cell in plan.cells:
        strategy = make_edge_config(cell.edge_settings(config.edge_settings)).draft.strategy
        if strategy != MODEL:
            raise UsageError(
                f"draft_strategy: {strategy} in {cell.id}; a sweep in virtual time has recordings of {MODEL} alone, a "
                "system (`python -m outrider.experiments.simulator`) names those of others under `acceptance`"
            )


def _waves(asks: list[list[Ask]], has_outages: bool) -> Iterator[list[list[Ask]]]:
    """Yields all at once; where the link has outages, which begin anew with each request, one of each
    session."""
    if not has_outages:
        yield asks
        return
    for wave in zip(*asks, strict=True):
        yield [[ask] for ask in wave]


@dataclass(frozen=True, slots=True)
class _Stage:
    plan: Plan
    times: SystemTimes
    prompt_tokens: list[int]

    def traces(self, cell: Cell) -> list[TracedText]:
        config = self.plan.config
        if config.is_synthetic:
            acceptance: object = list(pair_from(config.synthetic or {}).alphas)
        else:
            acceptance = f"embedded T={cell.temperature:g}"
        return load_acceptance(acceptance, "the sweep's acceptance", config.seed)

    def asks(self, cell: Cell, repeat: int) -> list[list[Ask]]:
        places = {prompt.id: place for place, prompt in enumerate(self.plan.prompts)}
        found: list[list[Ask]] = [[] for _ in range(cell.num_sessions)]
        num_texts = len(self.traces(cell))
        for request in self.plan.requests_of(cell, repeat):
            place = places[request.prompt.id]
            ask = Ask(
                self.prompt_tokens[place],
                self.plan.config.max_new_tokens,
                text=place % num_texts,
                draw=repeat,
                name=request.prompt.id,
            )
            found[request.session].append(ask)
        return found

    def system(self, cell: Cell, repeat: int) -> System:
        from outrider.cloud_verifier.config import ServeConfig

        config, times = self.plan.config, self.times
        serve = {**(config.serve or {}), "min_forward_ms": cell.min_forward_ms}
        edge = EdgePlan(
            EdgeGroup(name=cell.id, count=cell.num_sessions),
            cell.link,
            make_edge_config(cell.edge_settings(config.edge_settings)),
            (1, 1),
            (1, 1),
            times.edge,
            times.draft,
            "verifiers",
        )
        verifier = VerifierPlan(
            VerifierGroup(),
            load_config(ServeConfig, content=(serve, "serve"), env={}).value,
            times.verifier,
            times.cloud_draft,
        )
        system = SystemConfig(cell.id, seconds=LONGEST_S, seed=config.seed + repeat)
        return System(system, times, (edge,), (verifier,))


def _adapted(times: SystemTimes, config: SweepConfig) -> SystemTimes:
    if not config.is_synthetic:
        return times
    pair = pair_from(config.synthetic or {})
    token_ms = 1e3 * pair.verify_token_s
    step_ms = max(0.0, 1e3 * pair.target_s - token_ms)
    verifier = replace(times.verifier, step_ms=step_ms, token_ms=token_ms, session_ms=0.0, context_ms=0.0)
    draft = replace(times.draft, token_ms=1e3 * pair.draft_token_s, call_ms=0.0, read_token_ms=0.0)
    cloud_draft = replace(draft, token_ms=1e3 * pair.colocated_draft_s)
    return replace(times, verifier=verifier, draft=draft, cloud_draft=cloud_draft)


def _num_tokens(text: str) -> int:
    return len(EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json").encode(text))
