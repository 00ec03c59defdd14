"""Enum tables and the checks that all decoders share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from outrider.common.errors import InvalidFieldError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import (
    CorrectionKind,
    GeneratedTokens,
    GrammarKind,
    Method,
    Opened,
    Origin,
    Progress,
    RoundError,
    RoundErrorCode,
    Verdict,
)

OpenReply = Opened | Progress | RoundError
VerifyReply = Verdict | Progress | RoundError
GenerateReply = GeneratedTokens | Progress | RoundError

_T = TypeVar("_T")
METHOD_NUMBERS = {m: pb.Method.Value(f"METHOD_{m.name}") for m in Method}
METHODS = {number: m for m, number in METHOD_NUMBERS.items()} | {pb.METHOD_UNSPECIFIED: Method.COUPLED}
GRAMMAR_KIND_NUMBERS = {k: pb.GrammarKind.Value(f"GRAMMAR_KIND_{k.name}") for k in GrammarKind}
GRAMMAR_KINDS = {number: k for k, number in GRAMMAR_KIND_NUMBERS.items()}
ORIGIN_NUMBERS = {o: pb.Origin.Value(f"ORIGIN_{o.name}") for o in Origin}
ORIGINS = {number: o for o, number in ORIGIN_NUMBERS.items()}
KIND_NUMBERS = {k: pb.CorrectionKind.Value(f"CORRECTION_KIND_{k.name}") for k in CorrectionKind}
KINDS = {number: k for k, number in KIND_NUMBERS.items()}
ERROR_NUMBERS = {c: pb.RoundErrorCode.Value(f"ROUND_ERROR_CODE_{c.name}") for c in RoundErrorCode}
ERRORS = {number: c for c, number in ERROR_NUMBERS.items()}


def decode_origins(numbers: Sequence[int]) -> tuple[Origin, ...]:
    """Returns origins for their numbers on the wire; raises `InvalidFieldError` for an unknown one."""
    return tuple(lookup(ORIGINS, number, "origins") for number in numbers)


def lookup(table: dict[int, _T], number: int, field: str) -> _T:
    """Returns a table's entry; raises `InvalidFieldError` for an unknown number of `field`."""
    try:
        return table[number]
    except KeyError:
        raise InvalidFieldError(field, f"unknown value {number}") from None


def check_length(field: str, values: Sequence[object], expected: int, per: str) -> None:
    """Raises `InvalidFieldError` unless a field is empty or has `expected` entries, one per `per`."""
    if len(values) not in (0, expected):
        raise InvalidFieldError(field, f"has {len(values)} entries; want none or {expected}, one per {per}")
