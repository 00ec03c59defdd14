"""Shows what a calibration found: as a gate file, as text and as JSON."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.common.process.version import own_version
from outrider.edge_client.calibration.curve import Curve, curve_table
from outrider.edge_client.calibration.passages import ValidationText
from outrider.edge_client.calibration.quantiles import Sample, Sorting, by_name, sort_samples, thresholds_at
from outrider.edge_client.config.gate import split_names
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.gate.file import GateFile
from outrider.edge_client.gate.words import count_words, packed

_UNITS = {"nll": "nats", "entropy": "bits", "margin": "", "variance": "nats²"}


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """Holds the result of one calibration."""

    gate_file: GateFile
    percentile: float
    sorting: Sorting
    num_samples: int
    is_target: bool  # drafted along the target's text
    out: Path = Path()
    curve: Curve | None = None

    def as_json(self) -> dict[str, object]:
        """Returns the object that `--json` prints."""
        thresholds = {name: getattr(self.gate_file, name) for name in _UNITS}
        return {
            "out": str(self.out),
            "thresholds": {name: value for name, value in thresholds.items() if value is not None},
            "rules": list(self.gate_file.rules),
            "max_hard_ratio": self.gate_file.max_hard_ratio or 0.0,
            "num_draft_tokens": self.num_samples,
            **asdict(self.sorting),
            "source": self.gate_file.source,
            "curve": None if self.curve is None else asdict(self.curve),
        }

    def as_text(self) -> str:
        """Returns the lines for a person."""
        along = "what the target wrote" if self.is_target else "the text itself"
        lines = [f"{self.num_samples} tokens drafted along {along}; percentile {self.percentile:g}:"]
        for name, share in self.sorting.hard_share_of.items():
            value = f"{getattr(self.gate_file, name):.6g} {_UNITS[name]}".rstrip()
            side = "below" if name == "margin" else "above"
            auc = self.sorting.auc_of.get(name)
            tells = "" if auc is None else f", tells rejected ones with an AUC of {auc:.3f}"
            lines.append(f"  {name:<9} hard {side} {value:<16} {share:.1%} of the tokens{tells}")
        lines.append(f"  any of them: {self.sorting.hard_share:.1%} of the tokens")
        easy, hard = self.sorting.right_of_easy, self.sorting.right_of_hard
        if easy is not None and hard is not None:
            lines.append(f"  of these the target has {hard:.1%} too, of the others {easy:.1%}")
        if self.curve is not None:
            lines += ["", "commit-gate, calls against no gate:"]
            lines.append(curve_table(self.curve.points, self.curve.cloud_only_nats))
        lines += ["", f"{self.out}: edge-client run --gate stop|commit --gate-file {self.out}"]
        return "\n".join(lines)


def make_result(
    samples: Sequence[Sample],
    text: ValidationText,
    asked: RunConfig,
    draft_fingerprint: str,
    percentile: float,
    target_fingerprint: str,
) -> CalibrationResult:
    """Returns the thresholds at `percentile` and how they sort the samples. `target_fingerprint` is empty
    where no target was called."""
    thresholds = thresholds_at([sample.signals for sample in samples], percentile)
    words = count_words(text.documents)
    is_target = bool(target_fingerprint)
    source: dict[str, object] = {
        "command": "edge-client calibrate",
        "version": own_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "percentile": percentile,
        "signals": f"of tokens drafted along {'the text of the target' if is_target else 'the text itself'}",
        "num_draft_tokens": len(samples),
        "temperature": asked.sampling.temperature,
        "text": list(text.names),
        "text_sha256": text.sha256,
    }
    if is_target:
        source["target_fingerprint"] = target_fingerprint
    gate_file = GateFile(
        **{name: _rounded(value) for name, value in by_name(thresholds).items()},
        max_hard_ratio=asked.gate.max_hard_ratio,
        rules=split_names(asked.gate.rules),
        draft_fingerprint=draft_fingerprint,
        source=source,
        words=packed(words),
    )
    sorting = sort_samples(samples, thresholds, is_target)
    return CalibrationResult(gate_file, percentile, sorting, len(samples), is_target)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
