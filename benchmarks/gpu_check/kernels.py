"""The row kernels against those of the host, token for token, and their times beside one read of the logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu_check.stage import NONE, Report, Setting
from outrider.cloud_verifier.verification.row_kernels import RowKernels, load_row_kernels
from outrider.experiments.shared.results import at_most
from outrider.kernels import device, device_truncation

CUTS = ((0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (40, 0.95, 0.02))  # top-k, top-p, min-p
MAX_THRESHOLD_ERROR = 1e-5  # beyond it the two disagree about a score, not about its rounding
COMPARED_SHARE = 0.15  # of the stage's time, for each vocabulary


@dataclass
class Chunk:
    """Holds some rows on the device and their copies on the host; each row has a key and a temperature."""

    logits: torch.Tensor  # [rows, vocab], a view of padded rows
    temperatures: torch.Tensor
    keys: NDArray[np.uint64]
    cut: tuple[int, float, float]

    def __post_init__(self) -> None:
        self.rows: NDArray[np.float32] = self.logits.cpu().contiguous().numpy()
        self.bits = self.on_device(self.keys.view(np.int64))
        self.host_temperatures = self.temperatures.tolist()

    def on_device(self, values: NDArray[Any]) -> torch.Tensor:
        """Returns an array as a tensor beside the logits."""
        return torch.from_numpy(values).to(self.logits.device)


def run(setting: Setting, report: Report) -> None:
    """Compares `kernels.device` with `kernels.host.rows`, then measures it."""
    if setting.is_rehearsal:
        device.SPAN, device.TILE_BLOCKS = 2048, 128  # small rows have several spans, of few tiles
        device_truncation.NUM_PIVOTS = 32  # fewer passes, each of which the interpreter takes long for
    kernels = load_row_kernels()
    report.note(host_kernels=kernels.__name__)  # type: ignore[attr-defined]
    for vocab_size in setting.pick((8192, 128_256, 151_665), (100, 2100)):
        _compare(setting, report, kernels, vocab_size)
    _measure(setting, report)


def _compare(setting: Setting, report: Report, kernels: RowKernels, vocab_size: int) -> None:
    until_s = setting.seconds_left - COMPARED_SHARE * setting.limit_s
    wrong, num_rows = Wrong(), 0
    for number in range(setting.pick(40, len(CUTS))):
        if setting.seconds_left < until_s:
            break
        chunk = make_chunk(setting.device, vocab_size, setting.pick(50, 3), CUTS[number % len(CUTS)], number)
        wrong.add(compare(kernels, chunk))
        num_rows += len(chunk.rows)
    report.note(**{f"differing_{vocab_size}": {name: rows[:20] for name, rows in asdict(wrong).items()}})
    for name, rows in asdict(wrong).items():
        what = f"of {num_rows} rows x {vocab_size:,}, those whose {name.rstrip('s')} is not the host's"
        report.check(f"gpu.{name}.{vocab_size}", what, len(rows), "rows", NONE)


@dataclass
class Wrong:
    """Lists rows for which device and host differ: (row, the device's, the host's)."""

    samples: list[tuple[int, int, int]] = field(default_factory=list)
    residuals: list[tuple[int, int, int]] = field(default_factory=list)
    thresholds: list[tuple[int, float, float]] = field(default_factory=list)

    def add(self, other: Wrong) -> None:
        """Adds another chunk's."""
        self.samples += other.samples
        self.residuals += other.residuals
        self.thresholds += other.thresholds


def compare(kernels: RowKernels, chunk: Chunk) -> Wrong:
    """Computes a chunk on its device and, with `kernels`, on the host; returns where they differ."""
    thresholds = _thresholds(chunk)
    found = device.gumbel_argmax(chunk.logits, chunk.temperatures, thresholds, chunk.bits).token_ids.tolist()
    rows = zip(chunk.rows, chunk.host_temperatures, thresholds.tolist(), chunk.keys, strict=True)
    expected = [kernels.gumbel_argmax(*row) for row in rows]
    pairs = enumerate(zip(found, expected, strict=True))
    return Wrong(
        samples=[(row, mine, theirs[0]) for row, (mine, theirs) in pairs if mine != theirs[0]],
        residuals=_wrong_residuals(kernels, chunk, thresholds, expected),
        thresholds=_wrong_thresholds(kernels, chunk, thresholds.tolist()),
    )


def make_chunk(place: str, vocab_size: int, num_rows: int, cut: tuple[int, float, float], seed: int) -> Chunk:
    """Returns rows of different spread: some with ties, some with masked ids, padded as a model's are."""
    generator = torch.Generator(place).manual_seed(seed)
    padded = (num_rows, -(-vocab_size // 64) * 64)
    scales = torch.tensor([0.1, 1.0, 3.0, 10.0], device=place)
    logits = torch.randn(padded, device=place, generator=generator)
    logits *= scales[torch.arange(num_rows, device=place) % 4][:, None]
    if seed % 3 == 1:
        logits = logits.round()
    if seed % 3 == 2:
        masked = torch.rand(padded, device=place, generator=generator) < 0.5
        logits.masked_fill_(masked, -math.inf)
    temperatures = torch.tensor([1.0, 0.8, 0.1, 3.0], device=place)
    numbers = np.arange(num_rows, dtype=np.uint64)
    keys = np.stack([np.uint64(2**64 - 1) - numbers, numbers % 6, numbers + np.uint64(seed), numbers % 3], 1)
    rows = torch.arange(num_rows, device=place)
    return Chunk(logits[:, :vocab_size], temperatures[(rows + seed) % 4], keys, cut)


def _thresholds(chunk: Chunk) -> torch.Tensor:
    top_k, top_p, min_p = chunk.cut
    num_rows, vocab_size = chunk.logits.shape
    log_min_p = math.log(min_p) if min_p else -math.inf
    cut = np.int32(min(top_k, vocab_size - 1)), np.float64(top_p), np.float64(log_min_p)
    rows = np.arange(num_rows if chunk.cut != CUTS[0] else 0)
    columns = (np.full(len(rows), each) for each in cut)
    return device_truncation.truncation_thresholds(
        chunk.logits, chunk.temperatures, chunk.on_device(rows), *map(chunk.on_device, columns)
    )


def _wrong_thresholds(
    kernels: RowKernels, chunk: Chunk, thresholds: Sequence[float]
) -> list[tuple[int, float, float]]:
    """Compares what is kept: a threshold below every score keeps as much as none."""
    wrong = []
    for number, row in enumerate(chunk.rows):
        temperature, found = np.float32(chunk.host_temperatures[number]), thresholds[number]
        expected = kernels.truncation_threshold(row, float(temperature), *chunk.cut)
        scores = row / temperature
        is_equal = np.count_nonzero(scores >= found) == np.count_nonzero(scores >= np.float32(expected))
        if not is_equal and not math.isclose(found, expected, rel_tol=1e-6, abs_tol=MAX_THRESHOLD_ERROR):
            wrong.append((number, found, expected))
    return wrong


def _wrong_residuals(
    kernels: RowKernels, chunk: Chunk, thresholds: torch.Tensor, expected: Sequence[tuple[int, float, float]]
) -> list[tuple[int, int, int]]:
    """Samples again without each row's own sample, and with another weight for id 0."""
    num_rows = len(expected)
    ids = np.full((num_rows, device.MAX_CHANGED), device.NO_CHANGE, np.int32)
    weights = np.full(ids.shape, -math.inf)
    ids[:, 0], ids[:, 1] = [each[0] for each in expected], [int(each[0] == 0) for each in expected]
    weights[:, 1] = -0.3
    tops, log_sums = (np.array([each[i] for each in expected]) for i in (1, 2))
    arrays = np.arange(num_rows), tops, log_sums, ids, weights
    changes = device.Changes(*map(chunk.on_device, arrays))
    picked = device.sample(chunk.logits, chunk.temperatures, thresholds, chunk.bits, changes).tolist()
    wrong = []
    for row, (_, top, log_sum) in enumerate(expected):
        changed = ids[row, :2].astype(np.int64), weights[row, :2].copy()
        known = chunk.host_temperatures[row], float(thresholds[row])
        right = kernels.sample(chunk.rows[row], *known, chunk.keys[row], top, log_sum, *changed)
        if picked[row] != right:
            wrong.append((row, picked[row], right))
    return wrong


def _measure(setting: Setting, report: Report) -> None:
    vocab_size, bandwidth = setting.pick(151_665, 2100), setting.copy_gbps()
    for num_rows in setting.pick((5, 80, 320), (2,)):
        chunk = make_chunk(setting.device, vocab_size, num_rows, CUTS[0], 0)
        thresholds = _thresholds(chunk)
        arguments = chunk.logits, chunk.temperatures, thresholds, chunk.bits
        scan_ms = setting.device_ms(partial(device.gumbel_argmax, *arguments))
        sum_ms = setting.device_ms(partial(chunk.logits.logsumexp, 1))
        floor_ms = 4 * num_rows * vocab_size / 1e6 / bandwidth
        what = f"scan of {num_rows} x {vocab_size:,}"
        report.note(**{f"scan_{num_rows}": {"ms": scan_ms, "logsumexp_ms": sum_ms, "floor_ms": floor_ms}})
        target = at_most(3.0) if num_rows == 320 else None
        report.figure(f"gpu.scan.{num_rows}", f"{what} : one read of it", scan_ms / floor_ms, "ratio", target)
        report.figure(f"gpu.scan_sum.{num_rows}", f"{what} : torch.logsumexp", scan_ms / sum_ms, "ratio")
        found = device.gumbel_argmax(*arguments)
        ids = np.full((num_rows, device.MAX_CHANGED), device.NO_CHANGE, np.int32)
        ids[:, :16] = np.arange(16)  # as many as a draft's support has
        arrays = np.arange(num_rows), ids, np.full(ids.shape, -1.0)
        rows, changed, weights = (chunk.on_device(each) for each in arrays)
        changes = device.Changes(rows, found.tops.double(), found.log_sums, changed, weights)
        residual_ms = setting.device_ms(partial(device.sample, *arguments, changes))
        what = f"residuals of {num_rows} x {vocab_size:,}, in one launch : scan"
        report.figure(f"gpu.residual.{num_rows}", what, residual_ms / scan_ms, "ratio")
    chunk = make_chunk(setting.device, vocab_size, setting.pick(320, 2), CUTS[2], 0)
    cut_ms = setting.device_ms(partial(_thresholds, chunk))
    report.figure(
        "gpu.truncation", f"top-p thresholds of {len(chunk.rows)} rows, in one launch", cut_ms, "ms"
    )
