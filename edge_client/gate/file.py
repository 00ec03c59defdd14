"""Reads and writes gate files: YAML from `edge-client calibrate`, for `--gate-file`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.common.config.loader import load_config, option
from outrider.common.errors import ConfigError
from outrider.edge_client.gate.words import WordCounts


@dataclass(frozen=True, slots=True)
class GateFile:
    """Holds thresholds and their origin; a signal without a threshold is not looked at. `source` is for
    people: the draft, the text, the share of hard tokens."""

    nll: float | None = option(None, "nats", minimum=0.0)
    entropy: float | None = option(None, "bits", minimum=0.0)
    margin: float | None = option(None, "between probabilities", minimum=0.0, maximum=1.0)
    variance: float | None = option(None, "nats²", minimum=0.0)
    max_hard_ratio: float | None = option(None, "share of a block", minimum=0.0, maximum=1.0)
    rules: tuple[str, ...] = option((), "names of text rules")
    draft_fingerprint: str = option("", "of the draft whose signals the thresholds are for; empty: any")
    source: Any = option(None, "where the thresholds come from")
    words: Any = option(None, "how often words occur, for the rule rare: {total: N, by_count: {N: words}}")

    @property
    def word_counts(self) -> WordCounts | None:
        """Returns the counts of words; None where there are none. Raises `ConfigError` where they are
        malformed."""
        if self.words is None:
            return None
        try:
            counts = {word: int(n) for n, words in self.words["by_count"].items() for word in words.split()}
            return WordCounts(int(self.words["total"]), counts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError("words (gate file): expected {total: N, by_count: {N: 'word ...'}}") from error


def read_gate_file(path: Path) -> GateFile:
    """Returns the file's content. Raises `ConfigError` naming the file, the key and what was expected."""
    return load_config(GateFile, yaml_path=path, env={}).value


def write_gate_file(path: Path, content: GateFile) -> None:
    """Writes the file, without keys that are empty."""
    import yaml

    told = {name: getattr(content, name) for name in GateFile.__dataclass_fields__}
    told = {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}
    kept = {name: value for name, value in told.items() if value not in (None, [], "")}
    path.write_text(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True), encoding="utf-8")
