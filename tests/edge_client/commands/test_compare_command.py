"""`edge-client draft compare`: who is measured, who is recommended, what is printed and refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.edge.tiny_draft import make_backend, make_tiny_draft
from support.processes.server import serving

from outrider.common.errors import UsageError
from outrider.edge_client.commands.cli import main
from outrider.edge_client.commands.compare import comparison_json, comparison_text
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.planning import compare as comparing
from outrider.edge_client.planning.compare import (
    CLOSE_SHARE,
    LONGEST,
    ComparedDraft,
    Comparison,
    measure_drafts,
)
from outrider.edge_client.planning.measure import _num_judged
from outrider.edge_client.planning.plan import GIVEN, Known, Plan, complete_parts, make_plan

RTTS_S = (0.001, 0.1)


def plan(alpha: float, draft_s: float, rtt_s: float, target_s: float) -> Plan:
    known = {"draft_token": draft_s, "rtt": rtt_s, "target_token": target_s}
    parts = {name: Known(value, GIVEN) for name, value in known.items()}
    return make_plan(complete_parts(**parts, acceptance=(Known(alpha, GIVEN),)), 16)


def comparison(target_s: float = 0.05, **drafts: tuple[float, float]) -> Comparison:
    """Of drafts by (acceptance, seconds a token)."""
    compared = (
        ComparedDraft(name, {rtt_s: plan(*values, rtt_s, target_s) for rtt_s in RTTS_S})
        for name, values in drafts.items()
    )
    return Comparison(tuple(compared), RTTS_S)


def test_a_slow_good_draft_is_recommended_where_rounds_are_dear() -> None:
    found = comparison(quick=(0.7, 0.001), good=(0.9, 0.01))
    near, far = (found.recommended(rtt_s) for rtt_s in RTTS_S)
    assert near is not None and far is not None and (near.name, far.name) == ("quick", "good")
    told = comparison_text(found)
    assert told.startswith("On this link: quick, ") and "At 100 ms: good, " in told
    rows = [line.split() for line in told.splitlines()]
    assert [row[0] for row in rows if row and row[0] in ("quick", "good", "none")] == [
        "quick",
        "good",
        "none",
    ]


def test_drafts_that_cannot_be_told_apart_are_named() -> None:
    found = comparison(first=(0.80, 0.001), second=(0.799, 0.001), third=(0.5, 0.001))
    assert found.close_to(RTTS_S[0]) == ["second"] and CLOSE_SHARE < 0.1
    assert "not told apart from second." in comparison_text(found)
    assert Comparison(found.drafts, RTTS_S, noise_share=3.0).close_to(RTTS_S[0]) == ["second", "third"]


def with_sequences(name: str, shares: list[float]) -> ComparedDraft:
    """A draft each of whose sessions, of 40 tokens, has a share of its own that the target accepts."""
    sequences = tuple(tuple((7 * at) % 10 < 10 * share for at in range(40)) for share in shares)
    known = {"draft_token": 0.001, "rtt": 0.001, "target_token": 0.05}
    parts = {name: Known(value, GIVEN) for name, value in known.items()}
    accepted = (Known(sum(shares) / len(shares), GIVEN),)
    return ComparedDraft(
        name, {0.001: make_plan(complete_parts(**parts, acceptance=accepted, sequences=sequences), 8)}
    )


def test_a_lead_that_other_sessions_would_have_turned_is_no_lead() -> None:
    mixed, steady = with_sequences("mixed", [0.9] * 3 + [0.3] * 3), with_sequences("steady", [0.5] * 6)
    uniform = with_sequences("uniform", [0.9] * 6)
    assert Comparison((mixed, steady), (0.001,)).close_to(0.001)
    assert Comparison((uniform, steady), (0.001,)).close_to(0.001) == []


def test_the_json_has_every_prediction_and_no_name_where_nothing_pays() -> None:
    found = comparison(target_s=0.02, good=(0.9, 0.02), quick=(0.6, 0.001))
    assert "At 100 ms no draft pays: the target alone writes 50.0 tokens/s" in comparison_text(found)
    record = comparison_json(found)
    assert (record["recommended"], [each["name"] for each in record["drafts"]]) == (
        "quick",
        ["quick", "good"],
    )
    assert [(each["rtt_ms"], each["recommended"]) for each in record["at"]] == [(1.0, "quick"), (100.0, None)]
    first = record["drafts"][0]
    assert first["draft_ms_per_token"] == 1.0 and [each["rtt_ms"] for each in first["predicted"]] == [
        1.0,
        100.0,
    ]
    json.dumps(record)


def test_candidates_run_the_same_sessions_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Any, Any, int, str]] = []

    def record(edge: Any, errand: Any, samples: Any) -> None:
        config, prompt, seed = errand
        seen.append((edge.name, prompt, config.depth.num_speculative_tokens, seed, str(config.mode)))

    monkeypatch.setattr(comparing, "run_errand", record)
    edges = {name: SimpleNamespace(name=name, config=run_config()) for name in ("a", "b")}
    ticks = itertools.count()
    measure_drafts(edges, prompts=[(1, 2), (3,)], seconds=5.0, clock=lambda: next(ticks))  # type: ignore[arg-type]
    of_a, of_b = ([each[1:] for each in seen if each[0] == name] for name in "ab")
    assert of_a == of_b and [each[0] for each in seen[:4]] == ["a", "b", "a", "b"]
    assert {each[1] for each in of_a if each[3] == "speculative"} >= {
        0,
        1,
        2,
        4,
        8,
        12,
    }  # though the time was over


def test_what_a_copy_lacks_of_the_asked_length_counts_as_rejected() -> None:
    config = run_config(num_speculative_tokens=8)
    round_ = RoundRecord.__new__(RoundRecord)
    object.__setattr__(round_, "num_draft_tokens", 3)
    for signals, judged in (((), 8), (("entropy",), 3)):
        edge: Any = SimpleNamespace(draft=SimpleNamespace(signal_names=signals))
        assert _num_judged(edge, config, round_) == judged


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("compare"))


def test_the_command_compares_a_directory_and_a_strategy(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("def f(x):\n    return x\n" * 40)
    with serving(make_backend(draft)) as server:
        flags = ["--verifier", f"127.0.0.1:{server.port}", "--measure-s", "0.1", "--rtt", "30ms", "--json"]
        status = main(["draft", "compare", str(draft), "prompt-lookup", "--text", str(text), *flags])
    assert status == 0
    record = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in record["drafts"]} == {str(draft), "prompt-lookup"}
    assert [each["rtt_ms"] for each in record["at"]] == [record["rtt_ms"], 30.0]
    assert all(each["tokens_per_round"] >= 1 for each in record["drafts"])
    lengths = [each["num_draft_tokens"] for draft in record["drafts"] for each in draft["predicted"]]
    assert max(lengths) <= LONGEST


@pytest.mark.parametrize(
    ("drafts", "flags", "message"),
    [
        (["nowhere"], [], "nowhere is no directory, and no strategy (staged, prompt-lookup"),
        (["prompt-lookup", "prompt-lookup"], [], "prompt-lookup is named twice"),
        (["prompt-lookup"], ["--measure-s", "0"], "--measure-s 0.0: want seconds above 0"),
        (["prompt-lookup"], ["--rtt", "30"], "--rtt 30: not a duration"),
        (["model+suffix"], ["--datastore", "x"], "--datastore goes with a draft that has retrieval in it"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    drafts: list[str], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draft", "compare", *drafts, "--verifier", "127.0.0.1:1", *flags]) == UsageError.exit_code
    assert message in capsys.readouterr().err


def test_a_retrieval_is_a_candidate_with_its_datastore(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("def f(x):\n    return x\n" * 40)
    store = tmp_path / "store"
    assert (
        main(["draft", "datastore", "build", str(tmp_path / "text"), str(store), "--draft", str(draft)]) == 0
    )
    with serving(make_backend(draft)) as server:
        flags = ["--verifier", f"127.0.0.1:{server.port}", "--measure-s", "0.1"]
        compare = ["draft", "compare", str(draft), "retrieval", *flags]
        assert main(compare) != 0 and "--datastore" in capsys.readouterr().err
        main([*compare, "--datastore", str(store)])
    said = capsys.readouterr()
    assert "retrieval" in said.out or "too little was measured" in said.err


def test_candidates_of_different_tokenizers_are_refused_by_name(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(make_backend(draft)) as server:
        names = [str(draft), str(Path(comparing.__file__).parents[2] / "models" / "embedded" / "draft")]
        flags = ["--verifier", f"127.0.0.1:{server.port}"]
        assert main(["draft", "compare", *names, *flags]) == UsageError.exit_code
    assert "have different tokenizers: only one can be the verifier's" in capsys.readouterr().err
