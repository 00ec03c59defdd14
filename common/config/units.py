"""Parses and shows quantities as people write them on a command line: 10ms, 10mbit, 7B, 900GB/s, 300T."""

from __future__ import annotations

import math
import re

from outrider.common.errors import ConfigError, UsageError

_NUMBER = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-zµ/]*)", re.ASCII | re.IGNORECASE)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_SCALED = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d+)?|\.\d+)\s*([kmgbtp]?)([a-z/]*)", re.ASCII | re.IGNORECASE)
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", re.ASCII)
_BYTES = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_size(text: str, flag: str) -> int:
    """Returns the bytes of "512MiB", "1.5GiB" or "65536"; raises `ConfigError` naming `flag` for anything else."""
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None or match[2] not in _BYTES or not (num_bytes := int(float(match[1]) * _BYTES[match[2]])):
        raise ConfigError(f"{flag} {text}: not a size; write bytes, or a number with KiB, MiB or GiB: 512MiB")
    return num_bytes


def parse_duration(text: str, flag: str) -> float:
    """Returns the seconds of "10ms", "1.5s", "800us" or a bare 0; raises `UsageError` naming `flag`."""
    number, unit = _split(text)
    if number is None or (unit not in _SECONDS and number != 0):
        raise UsageError(f"{flag} {text}: not a duration; write a number and its unit: 10ms, 1.5s, 800us")
    return number * _SECONDS.get(unit, 1.0)


def parse_rate(text: str, flag: str) -> float:
    """Returns the bytes a second of "10mbit" or "500kbit"; raises `UsageError` naming `flag`."""
    number, unit = _split(text)
    bits = _BITS_PER_S.get(unit.removesuffix("/s").removesuffix("ps"))
    if not number or bits is None:
        raise UsageError(f"{flag} {text}: not a rate above 0; write 10mbit, 500kbit or 1gbit (a second)")
    return number * bits / 8


def parse_share(text: str, flag: str) -> float:
    """Returns a number in [0, 1]; raises `UsageError` naming `flag`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise UsageError(f"{flag} {text}: not a number between 0 and 1")
    return value


def parse_num_params(text: str, flag: str) -> float:
    """Returns the parameters of "7B", "350M" or "7e9"; raises `UsageError` naming `flag`."""
    return _parse_scaled(text, flag, ("",), "a number of parameters", "7B, 350M or 7e9")


def parse_bandwidth(text: str, flag: str) -> float:
    """Returns the bytes a second of "900GB/s", "3.3TB/s" or "9e11"; raises `UsageError` naming `flag`."""
    return _parse_scaled(text, flag, ("", "B/s"), "a memory bandwidth", "900GB/s or 3.3TB/s")


def parse_flops(text: str, flag: str) -> float:
    """Returns the operations a second of "300T", "300TFLOPS" or "3e14"; raises `UsageError` naming `flag`."""
    units = ("", "flops", "flop/s", "FLOPS", "FLOP/s")
    return _parse_scaled(text, flag, units, "operations a second", "300T or 300TFLOPS")


def _parse_scaled(text: str, flag: str, units: tuple[str, ...], what: str, examples: str) -> float:
    match = _SCALED.fullmatch(text.strip())
    if match is None or match[3] not in units or not float(match[1]):
        raise UsageError(f"{flag} {text}: not {what} above 0; write {examples}")
    return float(match[1]) * _PREFIXES[match[2].lower()]


def show_duration(seconds: float) -> str:
    """Returns three digits and the unit that suits: 46.3 ms, 800 µs, 1.5 s."""
    if seconds == 0 or not math.isfinite(seconds):
        return "0 ms" if seconds == 0 else "∞"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size * 0.9995:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def show_scaled(value: float, unit: str = "") -> str:
    """Returns three digits, a decimal prefix and the unit: 900 GB/s, 7 B."""
    prefix, size = next((p, s) for p, s in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("", 0.0)) if value >= s)
    return f"{_three(value / (size or 1))} {prefix}{unit}".rstrip()


def show_size(num_bytes: int) -> str:
    """Returns three digits and the unit that `--kv-memory` takes: 512MiB, 14.2GiB."""
    unit, size = next(
        (u, s)
        for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
        if num_bytes >= s or s == 1
    )
    value = num_bytes / size
    return f"{value:.0f}{unit}" if value >= 100 else f"{_three(value)}{unit}"


def show_rate(bytes_per_s: float) -> str:
    """Returns a link's rate in three digits of bits a second."""
    if not math.isfinite(bytes_per_s):
        return "not limited"
    bits = bytes_per_s * 8
    unit, size = next((u, s) for u, s in (("mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 0.0)) if bits >= s)
    return f"{_three(bits / (size or 1))} {unit}"


def _split(text: str) -> tuple[float | None, str]:
    match = _NUMBER.fullmatch(text.strip())
    return (None, "") if match is None else (float(match[1]), match[2].lower())


def _three(value: float) -> str:
    """Returns three significant digits, never as 1e+03."""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
