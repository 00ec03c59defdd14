"""Makes the gate's settings from `--gate` and its thresholds; combinations that cannot work are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

from outrider.common.config.fields import leaves
from outrider.common.errors import UsageError
from outrider.edge_client.config.draft_sections import GateConfig
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.core.options import MODES_WITH_ROUNDS, REQUESTABLE_MODES, Pipelining
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.registry import WITHOUT_SIGNALS
from outrider.edge_client.gate.file import GateFile, read_gate_file
from outrider.edge_client.gate.gate import Gate, GateSettings, GateUse
from outrider.edge_client.gate.rules import RuleNeeds, create_rules
from outrider.edge_client.gate.text_rule import NewDecoder
from outrider.edge_client.gate.thresholds import GateThresholds
from outrider.edge_client.gate.words import DEFAULT_RARE_PER_MILLION

_MODES = {
    GateUse.OFF: REQUESTABLE_MODES,
    GateUse.STOP: MODES_WITH_ROUNDS,
    GateUse.COMMIT: MODES_WITH_ROUNDS,
}
GATE_KEYS = tuple(leaf.key for leaf in leaves(RunConfig) if leaf.path[0] == "gate")
_CRITERIA = ("nll", "entropy", "margin", "variance", "rules", "file")  # a gate needs one of these
_FLAGS = {leaf.path[-1]: leaf.flag for leaf in leaves(RunConfig) if leaf.path[0] == "gate"}


def gate_settings(config: RunConfig) -> GateSettings | None:
    """Returns the gate's settings; None where no gate is asked for. Raises `UsageError` naming the flag that
    cannot be used and why."""
    gate = config.gate
    given = [
        name
        for name in (*_CRITERIA, "max_hard_ratio", "ner", "rare_per_million")
        if getattr(gate, name) not in (None, (), "")
    ]
    if gate.use is GateUse.OFF:
        if given:
            raise UsageError(f"{_FLAGS[given[0]]} goes with --gate stop or --gate commit")
        return None
    _check_place(config)
    if not any(name in _CRITERIA for name in given):
        flags = ", ".join(_FLAGS[name] for name in _CRITERIA)
        raise UsageError(f"--gate {gate.use} has no criterion: give any of {flags}")
    return _merge(gate, _stamp(gate.file))


def create_gate(
    settings: GateSettings | None, draft: DraftModel | None, new_decoder: NewDecoder
) -> Gate | None:
    """Returns the gate of one session; None where none is asked for. Raises `UsageError` where the draft does
    not measure a signal that has a threshold, and for thresholds calibrated with another draft."""
    if settings is None:
        return None
    assert draft is not None, "a gate's modes have a draft"
    measured = draft.signal_names
    for name in settings.thresholds.names:
        if name not in measured:
            raise UsageError(
                f"a threshold of {name} needs a draft that measures it; this one measures "
                f"{', '.join(measured) or 'no signals'}"
            )
    wanted = settings.draft_fingerprint
    if wanted and wanted != draft.fingerprint:
        theirs, ours = wanted[:12], draft.fingerprint[:12]
        raise UsageError(f"--gate-file is for the draft {theirs}, this one is {ours}: calibrate again")
    return Gate(settings, new_decoder)


def has_place(config: RunConfig) -> bool:
    """Returns whether the configuration's gate goes with its mode, pipelining and draft."""
    try:
        _check_place(config)
    except UsageError:
        return False
    return True


def judges_variance(config: RunConfig) -> bool:
    """Returns whether the gate has a threshold of variance, by flag or file. Raises `UsageError` as
    `gate_settings`."""
    settings = gate_settings(config)
    return settings is not None and settings.thresholds.variance is not None


def gate_warning(config: RunConfig) -> str | None:
    """Returns the warning that a commit-gate's text is approximate; None where each token is verified."""
    if config.gate.use is not GateUse.COMMIT or config.outage.reverify:
        return None
    return "--gate commit is approximate: blocks that the draft is sure of are kept unverified"


def without_gate(config: RunConfig) -> RunConfig:
    """Returns the same configuration with no gate."""
    return replace(config, gate=GateConfig())


def _check_place(config: RunConfig) -> None:
    use, modes = config.gate.use, _MODES[config.gate.use]
    if config.mode not in modes:
        wanted = " or ".join(f"--mode {mode}" for mode in modes)
        raise UsageError(f"--gate {use} needs {wanted}, not --mode {config.mode}")
    pipelining, strategy = config.pipelining.use, config.draft.strategy
    if use is GateUse.COMMIT and pipelining is Pipelining.ON:
        raise UsageError(
            f"--gate commit does not go with --pipeline {pipelining}: it needs one round at a time"
        )
    if use is not GateUse.OFF and strategy in WITHOUT_SIGNALS:
        raise UsageError(
            f"--gate {use} needs a draft that measures signals; --draft-strategy {strategy} has none"
        )


def _stamp(path: Path | None) -> tuple[int, int] | None:
    """Returns a value that changes when the file is written again."""
    if path is None or not path.exists():
        return None
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@lru_cache(8)
def _merge(config: GateConfig, stamp: tuple[int, int] | None) -> GateSettings:
    """Returns the flags merged with the file, flags first. Cached, since a rule may load a model or a list of
    words, which all sessions then share."""
    from_file = read_gate_file(config.file) if config.file is not None else GateFile()

    def first(name: str) -> float | None:
        given: float | None = getattr(config, name)
        return given if given is not None else getattr(from_file, name)

    thresholds = GateThresholds(**{field.name: first(field.name) for field in fields(GateThresholds)})
    per_million = config.rare_per_million
    needs = RuleNeeds(
        config.ner,
        from_file.word_counts,
        DEFAULT_RARE_PER_MILLION if per_million is None else per_million,
    )
    rule_names = split_names(config.rules) or from_file.rules
    if per_million is not None and "rare" not in rule_names:
        raise UsageError("--gate-rare-per-million goes with the rule rare: add it to --gate-rules")
    rules = create_rules(rule_names, needs)
    if not thresholds.names and not rules:
        raise UsageError(f"--gate-file {config.file} has neither a threshold nor a rule")
    max_hard_ratio = first("max_hard_ratio") or 0.0
    return GateSettings(config.use, thresholds, max_hard_ratio, rules, from_file.draft_fingerprint)


def split_names(entries: Sequence[str]) -> tuple[str, ...]:
    """Returns the names in `entries`, each of which has one or several with commas."""
    names = (part.strip() for entry in entries for part in entry.split(","))
    return tuple(dict.fromkeys(name for name in names if name))
