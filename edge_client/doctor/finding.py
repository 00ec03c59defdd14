"""Defines the result of one check."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field


class Status(enum.StrEnum):
    """Grades a finding."""

    OK = "ok"
    WARNING = "warning"  # it works, but not as well as it could, or not for long
    FAULT = "fault"
    SKIPPED = "skipped"  # an earlier fault hides it, or it was not asked for


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds what one check found. `todo` says what to do and is empty where nothing is; `facts` are for
    `--json`."""

    check: str
    status: Status
    found: str
    todo: str = ""
    facts: dict[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Returns the finding as JSON."""
        return asdict(self)


def ok(check: str, found: str, **facts: object) -> Finding:
    """Returns a finding that needs nothing done."""
    return Finding(check, Status.OK, found, "", facts)


def warning(check: str, found: str, todo: str, **facts: object) -> Finding:
    """Returns a finding that something works, but not as well as it could."""
    return Finding(check, Status.WARNING, found, todo, facts)


def fault(check: str, found: str, todo: str, **facts: object) -> Finding:
    """Returns a finding that something does not work."""
    return Finding(check, Status.FAULT, found, todo, facts)


def skipped(check: str, why: str) -> Finding:
    """Returns a finding for a check that was not made."""
    return Finding(check, Status.SKIPPED, why)
