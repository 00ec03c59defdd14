"""Reads the machine: its facts, a process's peak memory, and energy where counters exist."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGES = ("grpcio", "protobuf", "numpy", "onnxruntime", "tokenizers", "torch", "transformers", "numba")
_RAPL = Path("/sys/class/powercap")
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def machine_facts() -> dict[str, Any]:
    """Returns what is known of the machine."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "tcp_congestion_control": _CONGESTION.read_text().strip() if _CONGESTION.exists() else None,
        "load_average": round(os.getloadavg()[0], 2),
    }


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages that decode."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def reset_peak_rss(pid: int) -> bool:
    """Resets a process's peak memory; False where the kernel does not allow it."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_rss_bytes(pid: int) -> int | None:
    """Returns the peak since the last reset, or the process's start. None where it cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


class EnergyMeter:
    """Measures joules of the processor packages between `start` and `stop` (RAPL). Without counters: None."""

    def __init__(self, root: Path = _RAPL) -> None:
        # intel-rapl:0 is a zone, intel-rapl:0:0 a part of it; AMD machines use the same names. A zone "psys",
        # where there is one, holds the packages once more.
        self._zones = [
            zone
            for zone in sorted(root.glob("intel-rapl:*"))
            if zone.name.count(":") == 1 and _text_of(zone / "name").startswith("package")
        ]
        self._start: Mapping[Path, int] = {}

    def start(self) -> None:
        """Reads the counters."""
        self._start = self._read()

    def stop(self) -> float | None:
        """Returns the joules since `start`."""
        end = self._read()
        if not end or end.keys() != self._start.keys():
            return None
        return round(sum(self._used_uj(zone, end[zone]) for zone in end) / 1e6, 3)

    def _used_uj(self, zone: Path, now_uj: int) -> int:
        used = now_uj - self._start[zone]
        return used if used >= 0 else used + int((zone / "max_energy_range_uj").read_text())

    def _read(self) -> dict[Path, int]:
        try:
            return {zone: int((zone / "energy_uj").read_text()) for zone in self._zones}
        except (OSError, ValueError):
            return {}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def cpu_model() -> str:
    """Returns the processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
