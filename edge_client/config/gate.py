"""What `--gate` and its thresholds come to; combinations that cannot work are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.common.errors import UsageError
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.core.options import Mode
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.registry import WITHOUT_MODEL
from outrider.edge_client.gate.file import GateFile, read_gate_file
from outrider.edge_client.gate.gate import Gate, GateSettings, GateUse
from outrider.edge_client.gate.rules import NewDecoder, RuleNeeds, create_rules
from outrider.edge_client.gate.thresholds import GateThresholds
from outrider.edge_client.gate.words import DEFAULT_RARE_PER_MILLION

_MODES = {
    GateUse.OFF: tuple(Mode),
    GateUse.STOP: (Mode.SPECULATIVE, Mode.AUTO),
    GateUse.COMMIT: (Mode.SPECULATIVE,),
}
_JUDGES = ("gate_nll", "gate_entropy", "gate_margin", "gate_variance", "gate_rules", "gate_file")
GATE_KEYS = ("gate", *_JUDGES, "gate_max_hard_ratio", "gate_ner", "gate_rare_per_million")


def gate_settings(config: RunConfig) -> GateSettings | None:
    """None where no gate is asked for. Raises `UsageError` naming the flag that cannot be used and why."""
    use = GateUse(config.gate)
    given = [name for name in GATE_KEYS[1:] if getattr(config, name) not in (None, (), "")]
    if use is GateUse.OFF:
        if given:
            raise UsageError(f"{_flag(given[0])} goes with --gate stop or --gate commit")
        return None
    _check_place(config, use)
    if not any(name in _JUDGES for name in given):
        flags = ", ".join(map(_flag, _JUDGES))
        raise UsageError(f"--gate {use} judges by nothing: give any of {flags}")
    only_gate = RunConfig(**{name: getattr(config, name) for name in GATE_KEYS})
    return _merge(only_gate, _stamp(config.gate_file))


def create_gate(
    settings: GateSettings | None, draft: DraftModel | None, new_decoder: NewDecoder
) -> Gate | None:
    """Raises `UsageError` where the draft lacks a signal, and for thresholds that are another draft's."""
    if settings is None:
        return None
    assert draft is not None, "a gate's modes have a draft"
    told = draft.signal_names
    for name in settings.thresholds.names:
        if name not in told:
            raise UsageError(
                f"a threshold of {name} needs a draft that tells it; this one tells "
                f"{', '.join(told) or 'no signals'}"
            )
    wanted = settings.draft_fingerprint
    if wanted and wanted != draft.fingerprint:
        theirs, ours = wanted[:12], draft.fingerprint[:12]
        raise UsageError(f"--gate-file is for the draft {theirs}, this one is {ours}: calibrate again")
    return Gate(settings, new_decoder)


def has_place(config: RunConfig) -> bool:
    """Whether the configuration's gate goes with its mode, pipelining and draft."""
    try:
        _check_place(config, GateUse(config.gate))
    except UsageError:
        return False
    return True


def gate_warning(config: RunConfig) -> str | None:
    """The one line that a commit-gate owes its user; what is judged later is none of the gate's."""
    if config.gate != GateUse.COMMIT or config.reverify:
        return None
    return "--gate commit is approximate: blocks that the draft is sure of are kept without asking the target"


def without_gate(config: RunConfig) -> RunConfig:
    """The same configuration with none."""
    own: dict[str, Any] = {each.name: each.default for each in fields(RunConfig) if each.name in GATE_KEYS}
    return replace(config, **own)


def _check_place(config: RunConfig, use: GateUse) -> None:
    modes = _MODES[use]
    if config.mode not in modes:
        wanted = " or ".join(f"--mode {mode}" for mode in modes)
        raise UsageError(f"--gate {use} needs {wanted}, not --mode {config.mode}")
    if use is GateUse.COMMIT and config.pipeline != "off":
        raise UsageError(
            f"--gate commit keeps blocks between rounds, one at a time: not with --pipeline {config.pipeline}"
        )
    if use is not GateUse.OFF and config.draft_strategy in WITHOUT_MODEL:
        strategy = config.draft_strategy
        raise UsageError(
            f"--gate {use} asks how sure the draft is, and --draft-strategy {strategy} cannot tell"
        )


def _stamp(path: Path | None) -> tuple[int, int] | None:
    """Another one once the file was written anew."""
    if path is None or not path.exists():
        return None
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@lru_cache(8)
def _merge(config: RunConfig, stamp: tuple[int, int] | None) -> GateSettings:
    """Flags before the file. Read once for all sessions: a rule may bring a model or a list of words."""
    from_file = read_gate_file(config.gate_file) if config.gate_file is not None else GateFile()

    def first(name: str) -> float | None:
        given: float | None = getattr(config, f"gate_{name}")
        return given if given is not None else getattr(from_file, name)

    thresholds = GateThresholds(**{field.name: first(field.name) for field in fields(GateThresholds)})
    per_million = config.gate_rare_per_million
    needs = RuleNeeds(
        config.gate_ner,
        from_file.word_counts,
        DEFAULT_RARE_PER_MILLION if per_million is None else per_million,
    )
    rule_names = split_names(config.gate_rules) or from_file.rules
    if per_million is not None and "rare" not in rule_names:
        raise UsageError("--gate-rare-per-million goes with the rule rare: add it to --gate-rules")
    rules = create_rules(rule_names, needs)
    if not thresholds.names and not rules:
        raise UsageError(f"--gate-file {config.gate_file} has neither a threshold nor a rule")
    use = GateUse(config.gate)
    return GateSettings(use, thresholds, first("max_hard_ratio") or 0.0, rules, from_file.draft_fingerprint)


def split_names(entries: Sequence[str]) -> tuple[str, ...]:
    """Several in one, with commas, or one each."""
    names = (part.strip() for entry in entries for part in entry.split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
