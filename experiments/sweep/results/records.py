"""A results folder: its contents, as dataclasses, and how to read it. No other code knows the file names.

```
manifest.json   one Manifest: what was run, with what, where
requests.jsonl  a RequestRow a line, appended when a request ends
rounds.jsonl    a RoundRow a line, appended before its request's line
visits.jsonl    a VisitRow a line: one cell in one repeat, and what is measured of the machine as a whole
sweep.json      one Sweep, written at the end and on Ctrl-C: cells with metrics and intervals, comparisons
summary.csv     one line a cell, out of sweep.json
report.html     by outrider.experiments.report
```

Times are ms, sizes bytes, `*_s` seconds. None is "not measured here", never a zero. A reader ignores keys it
does not know and refuses another `schema`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from outrider.common.errors import UsageError

SCHEMA = 1
MANIFEST, REQUESTS, ROUNDS, VISITS = "manifest.json", "requests.jsonl", "rounds.jsonl", "visits.jsonl"
SWEEP, SUMMARY, REPORT = "sweep.json", "summary.csv", "report.html"

BASELINES = ("cloud-only", "co-located", "edge-only", "fixed")  # fixed: synchronous, one draft length
NO_LINK = "none"  # the realisation and the link's name of cells that send nothing (edge-only)

RowT = TypeVar("RowT")


@dataclass(frozen=True, slots=True)
class RoundRow:
    """Holds one round of speculation (docs/design.md §8). A co-located round crosses no network: its `rtt_ms` is
    0."""

    cell: str
    request: str
    round: int  # from 0, within its request
    at_ms: float  # when its tokens joined the text, since the request began
    num_draft_tokens: int
    num_accepted_tokens: int
    la_over_k: float
    alpha_mean: float | None
    draft_ms: float
    rtt_ms: float  # from sending the request to its answer, the verifier's time included
    net_ms: float  # rtt_ms without the verifier's time
    queue_ms: float
    forward_ms: float
    verifier_ms: float  # queue, forward and everything else over there
    batch_size: int  # sessions in that forward
    bytes_up: int  # payload
    bytes_down: int
    is_answered: bool = True
    fallback: bool = False  # no answer in time: its tokens, if any, are the draft's own
    kept: bool = False  # no round: a block that the gate let the edge keep without asking
    hard_ratio: float | None = None  # gate: share of uncertain tokens
    escalated: bool | None = None
    pipelined_hit: bool | None = None
    # Of a tree, whose nodes are its draft tokens: tokens of its likeliest path that were accepted, and its length.
    main_path: list[int] | None = None


@dataclass(frozen=True, slots=True)
class RequestRow:
    """Holds one request: a prompt decoded once. `error` is empty where it ended as it should."""

    cell: str
    request: str  # "<cell>/<repeat>/<session>/<prompt>", unique in the folder
    repeat: int
    session: int  # which of the cell's sessions at once, from 0
    prompt: str  # its id
    seed: int
    started_s: float  # seconds since the epoch
    link_age_ms: float  # how long its link had been open when it began: outages count from there
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str
    token_ids: list[int]  # new tokens only
    token_hash: str  # of them, BLAKE2b-64, hex
    token_times_ms: list[float]  # when each token joined the text, since the request began
    commit_times_ms: list[float]  # when tokens joined the text together: one entry a group
    token_origins: list[str]
    ttft_ms: float | None
    tpot_ms: float | None  # (last - first token) / (tokens - 1)
    total_ms: float | None  # until the last token
    otps: float | None  # tokens / total_ms, per second
    num_rounds: int  # answered ones
    num_draft_tokens: int
    num_accepted_tokens: int
    verifier_calls: int  # forwards of the target that this request took part in
    forward_s: float  # its share of them: a forward of b sessions counts 1/b
    cloud_draft_s: float  # its share of the draft's time where the draft is in the verifier (co-located)
    bytes_up: int  # payload of messages
    bytes_down: int
    num_unverified_tokens: int
    num_fallback_tokens: int
    num_approximate_tokens: int
    num_timeouts: int
    num_reconnects: int
    num_rebuilds: int
    num_refusals: int
    open_ms: float
    target: str = ""  # "<model id> (<dtype>, <device>)", as the verifier says
    target_fingerprint: str = ""
    draft_fingerprint: str = ""
    num_rolled_back_tokens: int = 0  # kept unverified, then taken back: the target disagreed with one of them
    labels: list[str] = field(default_factory=list)  # slow-downs and the like, of edge and verifier
    error: str = ""


@dataclass(frozen=True, slots=True)
class VisitRow:
    """Holds one cell in one repeat (several where a sweep was resumed): sums over its requests, and peaks."""

    cell: str
    repeat: int
    wall_s: float  # from the first request's begin to the last one's end
    num_requests: int
    num_tokens: int
    wire_bytes_up: int | None = None  # headers and retransmissions too, where the realisation counts them
    wire_bytes_down: int | None = None
    edge_peak_rss_bytes: int | None = None  # the largest of the edges
    verifier_peak_rss_bytes: int | None = None
    energy_j: float | None = None  # of the whole machine (RAPL packages), where counters can be read
    link_facts: dict[str, Any] = field(default_factory=dict)  # OpenLink.facts()
    # `MemoryPeaks` since the start of the verifier, which serves several cells; empty where its admin port is not known
    verifier_memory: dict[str, Any] = field(default_factory=dict)
    started_s: float = 0.0  # since the epoch


@dataclass(frozen=True, slots=True)
class Metric:
    """Holds a figure of a cell over its requests; `low` and `high` bound the bootstrap 95 % interval."""

    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    n: int = 0  # requests (or visits) it is taken from


@dataclass(frozen=True, slots=True)
class TextCheck:
    """Compares a cell's token ids with cloud-only's, by prompt and seed. Only cells that promise the same
    text (`is_exact_text`) fail by a difference; for the others `share_equal` is a quality."""

    is_exact_text: bool
    num_compared: int = 0  # requests
    num_equal: int = 0
    num_ties: int = 0  # differ where two scores of the target are equal within float error
    num_different: int = 0  # differ without such an excuse
    num_unjudged: int = 0  # differ, and no target was at hand to tell
    num_skipped: int = 0  # not comparable: no cloud-only text, an error, or unverified tokens
    share_equal: float | None = None  # tokens at the same place with the same id, up to the shorter text
    examples: list[str] = field(default_factory=list)  # requests that differ, the first few


@dataclass(frozen=True, slots=True)
class CellRow:
    """Holds one cell of the sweep: a link and everything that was set, and its metrics by name."""

    id: str
    link: dict[str, Any]  # the LinkProfile's fields
    realisation: str
    mode: str
    depth_policy: str
    num_speculative_tokens: int | None  # None: the policy's own start
    method: str
    tls: bool
    temperature: float
    num_sessions: int
    min_forward_ms: float
    min_draft_ms: float
    variant: str  # name of the settings it adds to the common ones; "" for none
    baseline: str  # one of BASELINES, or ""
    twin: str  # the cell it repeats under another name, for the A/A; or ""
    is_synthetic: bool
    labels: list[str]
    num_requests: int
    num_errors: int
    metrics: dict[str, Metric] = field(default_factory=dict)
    acceptance_per_position: list[float] = field(default_factory=list)  # of those reached: alpha_i
    a_cum: list[float] = field(default_factory=list)  # share of rounds in which the first i all stood
    texts: TextCheck = field(default_factory=lambda: TextCheck(False))
    tree: str | int = "off"  # nodes of its rounds' trees, or "auto"
    constraint: str = ""  # name of the grammar that its texts obey; "" for none
    a_a: dict[str, Any] = field(default_factory=dict)  # {"twin", "metric": {"speedup", "low", "high"}}

    @property
    def rtt_ms(self) -> float:
        """Returns the nominal RTT."""
        return float(self.link.get("rtt_ms", 0.0))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Says how many times better a cell is than a baseline of the same setting, over requests paired by
    prompt, repeat and session. `ratio` above 1: the cell is better (baseline / cell for times, cell /
    baseline for rates)."""

    cell: str
    baseline: str  # the baseline cell's id: the best one of its kind by TPOT
    kind: str  # one of BASELINES
    metric: str  # "tpot_ms", "ttft_ms", "total_ms" ...
    ratio: float
    low: float | None = None
    high: float | None = None
    n: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Holds what a model predicts of a cell, beside what was measured."""

    cell: str
    metric: str
    value: float
    unit: str
    source: str  # "costmodel", "simulator"
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Holds the content of sweep.json."""

    cells: list[CellRow]
    comparisons: list[Comparison]
    predictions: list[Prediction]
    is_complete: bool  # False: interrupted; what is there is valid
    missing_baselines: list[str] = field(default_factory=list)  # left out by the config's own wish
    num_different_texts: int = 0  # of cells that promise cloud-only's text; more than 0 fails the sweep
    schema: int = SCHEMA

    def cell(self, id: str) -> CellRow:
        """Returns the cell of that id."""
        return next(cell for cell in self.cells if cell.id == id)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Holds the content of manifest.json."""

    name: str
    commit: str
    is_dirty: bool
    command: str
    # The whole resolved sweep, running which again gives this folder's cells, with these and its prompts' SHA-256.
    config: dict[str, Any]
    models: dict[str, str]  # "target" by name, fingerprints; as far as known
    machine: dict[str, Any]  # cpu, cores, memory, kernel, python, congestion control
    seeds: dict[str, int]
    realisation: dict[str, Any]  # by name: facts of the links that were opened, the first of each profile
    calibration: list[
        dict[str, Any]
    ]  # points of outrider.experiments.links.calibration.measure; empty: not measured
    started: str  # ISO 8601, UTC
    finished: str = ""
    versions: dict[str, str] = field(default_factory=dict)  # of the packages that decode
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class Results:
    """Holds a whole folder. `sweep` is None where a run has not ended yet."""

    folder: Path
    manifest: Manifest
    requests: list[RequestRow]
    rounds: list[RoundRow]
    visits: list[VisitRow]
    sweep: Sweep | None


def read_results(folder: Path) -> Results:
    """Raises `UsageError` where `folder` holds no results, or results of another schema."""
    manifest = read_manifest(folder)
    requests = latest_requests(read_rows(folder / REQUESTS, RequestRow))
    known = {row.request for row in requests}
    rounds = [row for row in read_rows(folder / ROUNDS, RoundRow) if row.request in known]
    visits = list(read_rows(folder / VISITS, VisitRow))
    sweep = read_sweep(folder) if (folder / SWEEP).exists() else None
    return Results(folder, manifest, requests, rounds, visits, sweep)


def read_manifest(folder: Path) -> Manifest:
    """Reads manifest.json. Raises `UsageError`."""
    return from_json(Manifest, _read_json(folder / MANIFEST))


def read_sweep(folder: Path) -> Sweep:
    """Reads sweep.json. Raises `UsageError`."""
    record = _read_json(folder / SWEEP)
    cells = []
    for entry in record["cells"]:
        metrics = {name: from_json(Metric, metric) for name, metric in entry["metrics"].items()}
        texts = from_json(TextCheck, entry["texts"])
        cells.append(from_json(CellRow, {**entry, "metrics": metrics, "texts": texts}))
    comparisons = [from_json(Comparison, entry) for entry in record["comparisons"]]
    predictions = [from_json(Prediction, entry) for entry in record["predictions"]]
    parts = {"cells": cells, "comparisons": comparisons, "predictions": predictions}
    return from_json(Sweep, {**record, **parts})


def read_rows(path: Path, cls: type[RowT]) -> Iterator[RowT]:
    """Yields the rows of a JSONL file; none where it is missing. A last line cut off by a crash is passed
    over."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield from_json(cls, json.loads(line))


def latest_requests(rows: Iterable[RequestRow]) -> list[RequestRow]:
    """Returns one row a request: the last, where one that failed was run again."""
    return list({row.request: row for row in rows}.values())


def rounds_of_ended(requests: Iterable[RequestRow], rounds: Iterable[RoundRow]) -> list[RoundRow]:
    """Returns the rounds of all but the requests that failed, which are in no figure."""
    failed = {row.request for row in requests if row.error}
    return [row for row in rounds if row.request not in failed]


def to_json(row: Any) -> dict[str, Any]:
    """Returns a record as JSON takes it, keys in the order of its fields."""
    return dataclasses.asdict(row)


def write_json(path: Path, record: Any) -> None:
    """Writes a record whole or not at all: a reader never sees half a file."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(json.dumps(to_json(record), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{path.parent} holds no results: there is no {path.name}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if record.get("schema") != SCHEMA:
        raise UsageError(f"{path} has schema {record.get('schema')}; this program reads schema {SCHEMA}")
    return record


def from_json(cls: type[RowT], record: Mapping[str, Any]) -> RowT:
    """Returns a record out of JSON; keys that this program does not know are passed over."""
    known = {each.name for each in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{key: value for key, value in record.items() if key in known})
