"""What one check found."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field


class Status(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"  # it works, but not as well as it could, or not for long
    FAULT = "fault"
    SKIPPED = "skipped"  # an earlier fault hides it, or it was not asked for


@dataclass(frozen=True, slots=True)
class Finding:
    """`todo` is empty where nothing is to be done; `facts` are for `--json`."""

    check: str
    status: Status
    found: str
    todo: str = ""
    facts: dict[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def ok(check: str, found: str, **facts: object) -> Finding:
    return Finding(check, Status.OK, found, "", facts)


def warning(check: str, found: str, todo: str, **facts: object) -> Finding:
    return Finding(check, Status.WARNING, found, todo, facts)


def fault(check: str, found: str, todo: str, **facts: object) -> Finding:
    return Finding(check, Status.FAULT, found, todo, facts)


def skipped(check: str, why: str) -> Finding:
    return Finding(check, Status.SKIPPED, why)
