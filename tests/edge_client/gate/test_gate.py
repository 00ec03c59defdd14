"""The gate by itself: thresholds, the stop rule, judgements, and which settings go together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.edge.telling_draft import HARD_PLACE, HARD_TOKEN, SURE, make_gate

from outrider.common.config.loader import load_config, with_values
from outrider.common.errors import ConfigError, UsageError
from outrider.common.types import Draft, Signals
from outrider.edge_client.config.gate import create_gate, gate_settings, has_place, without_gate
from outrider.edge_client.config.run_config import RunConfig, run_config
from outrider.edge_client.controller.round_costs import RoundCosts
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.base import Stop, ended
from outrider.edge_client.drafting.copying.prompt_lookup import PromptLookupModel
from outrider.edge_client.drafting.trees import TreeDraft
from outrider.edge_client.gate.file import GateFile, read_gate_file, write_gate_file
from outrider.edge_client.gate.gate import Gate, GateSettings, GateUse
from outrider.edge_client.gate.text_rule import BlockText
from outrider.edge_client.gate.thresholds import GateThresholds

STOP = run_config(gate="stop", gate_nll=1.0)


def make_draft(*signals: Signals) -> Draft:
    token_ids = tuple(range(40, 40 + len(signals)))
    return Draft(token_ids, (0.5,) * len(token_ids), signals)


# ----------------------------------------------------------------------------------- thresholds


@pytest.mark.parametrize(
    ("thresholds", "hard", "easy", "is_of_the_place"),
    [
        (GateThresholds(entropy=1.0), Signals(1.01, 9.0, 0.0), Signals(1.0, 9.0, 0.0), True),
        (GateThresholds(margin=0.2), Signals(9.0, 9.0, 0.19), Signals(9.0, 9.0, 0.2), True),
        (GateThresholds(variance=0.1), Signals(9.0, 9.0, 0.0, 0.11), Signals(9.0, 9.0, 0.0, 0.1), True),
        (GateThresholds(nll=1.0), Signals(9.0, 1.01, 0.0), Signals(9.0, 1.0, 0.0), False),
    ],
)
def test_each_threshold_looks_at_its_own_signal(
    thresholds: GateThresholds, hard: Signals, easy: Signals, is_of_the_place: bool
) -> None:
    assert thresholds.is_hard(hard) and not thresholds.is_hard(easy)
    assert thresholds.is_position_hard(hard) is is_of_the_place
    assert thresholds.is_token_hard(hard) is not is_of_the_place
    assert not GateThresholds().is_hard(hard)
    assert len(thresholds.names) == 1 and GateThresholds().names == ()


# ------------------------------------------------------------------------------------ stop rule


@pytest.mark.parametrize(
    ("signals", "num_kept", "is_dropped"),
    [
        ((SURE, SURE, SURE), 3, False),
        ((SURE, HARD_PLACE, SURE), 1, True),
        ((HARD_PLACE, SURE, SURE), 0, True),
        ((SURE, SURE, HARD_PLACE), 2, True),
        ((SURE, HARD_TOKEN, SURE), 2, False),
        ((SURE, SURE, HARD_TOKEN), 3, False),
        ((SURE, Signals(3.0, 3.0, 0.9), SURE), 1, True),
    ],
)
def test_a_draft_ends_before_a_hard_place_and_after_a_hard_token(
    signals: tuple[Signals, ...], num_kept: int, is_dropped: bool
) -> None:
    draft = ended(make_draft(*signals), make_gate(GateUse.STOP).stop_rule(()))
    assert draft.token_ids == (40, 41, 42)[:num_kept] and len(draft.signals) == num_kept
    assert draft.doubted == (signals[num_kept] if is_dropped else None)


def test_a_share_of_the_tokens_may_be_hard() -> None:
    gate = make_gate(GateUse.STOP, max_hard_ratio=0.4)
    signals = (SURE, SURE, HARD_TOKEN, SURE, HARD_PLACE, HARD_PLACE, SURE)
    draft = ended(make_draft(*signals), gate.stop_rule(()))
    assert len(draft.token_ids) == 5 and draft.doubted == HARD_PLACE, "3 of 6 would be hard"
    judgement = gate.judge(draft, ())
    assert judgement.is_hard == (False, False, True, False, True) and judgement.hard_mask == b"\x14"
    assert judgement.hard_ratio == 0.5 and judgement.is_escalated
    never = make_gate(GateUse.STOP, max_hard_ratio=1.0)
    whole = make_draft(HARD_PLACE, HARD_TOKEN)
    assert ended(whole, never.stop_rule(())) == whole and not never.judge(whole, ()).is_escalated


def test_a_commit_gate_judges_whole_blocks_and_ends_none() -> None:
    gate = make_gate(GateUse.COMMIT, max_hard_ratio=0.5)
    assert gate.stop_rule(()) is None
    half, more = make_draft(SURE, HARD_PLACE), make_draft(SURE, HARD_PLACE, HARD_TOKEN)
    assert not gate.judge(half, ()).is_escalated and gate.judge(more, ()).is_escalated
    assert gate.judge(more, ()).hard_mask == b"\x06"
    nothing = gate.judge(Draft((), ()), ())
    assert nothing.hard_ratio is None and nothing.hard_mask == b"" and not nothing.is_escalated


def test_a_mask_has_a_bit_for_every_token() -> None:
    signals = [HARD_TOKEN if index in (0, 9) else SURE for index in range(10)]
    assert make_gate(GateUse.COMMIT).judge(make_draft(*signals), ()).hard_mask == b"\x01\x02"


class Word:
    """Doubts every token of the word `bad`, wherever it begins; tells what it was shown."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def hard_tokens(self, block: BlockText) -> set[int]:
        self.seen.append(f"{block.context}|{block.text}")
        start = (block.context + block.text).rfind("bad") - len(block.context)
        if "bad" not in block.context + block.text:
            return set()
        return {index for index in range(start, start + 3) if 0 <= index < len(block.token_ids)}


def letters(prompt_ids: list[int] | None = None) -> object:
    return chr


def of_letters(text: str) -> Draft:
    return Draft(tuple(map(ord, text)), (0.5,) * len(text), (SURE,) * len(text))


def test_a_text_rule_ends_a_draft_after_the_token_that_tells_and_escalates_whatever_the_share() -> None:
    rule = Word()
    settings = GateSettings(GateUse.STOP, GateThresholds(), max_hard_ratio=1.0, rules=(rule,))
    gate = Gate(settings, letters)  # type: ignore[arg-type]
    before = [ord(letter) for letter in "x" * 40 + "a b"]
    draft = ended(of_letters("ad luck"), gate.stop_rule(before))
    assert bytes(draft.token_ids) == b"ad" and draft.doubted is None
    assert rule.seen == ["x" * 29 + "a b|a", "x" * 29 + "a b|ad"], "as much of the text as a rule looks at"
    judgement = gate.judge(draft, before)
    assert judgement.is_hard == (True, True) and judgement.is_escalated
    assert not gate.judge(of_letters("luck"), before).is_escalated


def test_of_a_tree_each_path_is_ended_by_itself_and_the_likeliest_one_is_judged() -> None:
    gate = make_gate(GateUse.STOP, max_hard_ratio=0.5)
    rule = gate.node_rule(())
    assert rule is not None and make_gate(GateUse.COMMIT).node_rule(()) is None
    assert rule((1,), SURE) is Stop.NO
    assert rule((1, 2), HARD_TOKEN) is Stop.NO, "one of two"
    assert rule((1, 3), SURE) is Stop.NO
    assert rule((1, 2, 4), HARD_PLACE) is Stop.BEFORE, "two of three"
    assert rule((1, 3, 4), HARD_PLACE) is Stop.NO
    assert rule((1, 3, 4, 5), HARD_TOKEN) is Stop.NO
    assert rule((1, 3, 4, 5, 6), HARD_TOKEN) is Stop.AFTER
    tree = TreeDraft((1, 2, 3, 4), (), (SURE, HARD_TOKEN, SURE, HARD_PLACE), parents=(-1, 0, 0, -1))
    judgement = gate.judge(tree, ())
    assert judgement.hard_mask == b"\x0a" and judgement.hard_ratio == 0.5 and not judgement.is_escalated


def test_a_text_rule_reads_every_path_of_a_tree() -> None:
    settings = GateSettings(GateUse.STOP, GateThresholds(), max_hard_ratio=1.0, rules=(Word(),))
    gate = Gate(settings, letters)  # type: ignore[arg-type]
    rule = gate.node_rule([ord("b")])
    assert rule is not None
    for text, stop in {"a": Stop.NO, "o": Stop.NO, "ad": Stop.AFTER, "ag": Stop.NO, "od": Stop.NO}.items():
        assert rule(tuple(map(ord, text)), SURE) is stop
    token_ids = tuple(map(ord, "adgo"))  # a, then d or g; o
    tree = TreeDraft(token_ids, (), (SURE,) * 4, parents=(-1, 0, 0, -1))
    judgement = gate.judge(tree, [ord("b")])
    assert judgement.is_hard == (True, True, False, False) and judgement.is_escalated


def test_a_draft_without_a_gate_or_signals_is_what_it_was() -> None:
    draft = Draft((1, 2), (0.5, 0.5))
    assert ended(draft, None) is draft
    assert ended(draft, lambda token_id, signals, number: Stop.NO) is draft


# ------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gate": "off"}, "--gate-nll goes with --gate stop or --gate commit"),
        ({"gate_nll": None}, "--gate stop has no criterion: give any of --gate-nll"),
        ({"gate_nll": None, "gate_max_hard_ratio": 0.5}, "has no criterion"),
        ({"mode": "cloud-only"}, "stop needs --mode speculative or --mode auto, not --mode cloud-only"),
        ({"mode": "co-located"}, "not --mode co-located"),
        ({"mode": "edge-only"}, "not --mode edge-only"),
        ({"gate": "commit", "mode": "edge-only"}, "--gate commit needs --mode speculative"),
        ({"gate": "commit", "mode": "cloud-only"}, "--gate commit needs --mode speculative"),
        ({"gate": "commit", "mode": "co-located"}, "--gate commit needs --mode speculative"),
        ({"gate": "commit", "pipeline": "on"}, "does not go with --pipeline on"),
        ({"draft_strategy": "prompt-lookup"}, "--draft-strategy prompt-lookup has none"),
        ({"gate_rules": ("digits,digit",)}, "unknown gate rule 'digit'; known: digits"),
        ({"gate_file": Path("/no/such/file")}, "cannot read /no/such/file"),
    ],
)
def test_what_a_gate_cannot_do_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        gate_settings(with_values(STOP, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{}, {"mode": "auto"}, {"pipeline": "on"}, {"pipeline": "auto"}, {"gate": "commit"}, {"method": "block"}],
)
def test_what_a_gate_goes_with(changes: dict[str, object]) -> None:
    config = with_values(STOP, **changes)
    settings = gate_settings(config)
    assert settings is not None and settings.thresholds == GateThresholds(nll=1.0) and has_place(config)


def test_no_gate_is_the_default_and_a_gate_can_be_taken_off() -> None:
    assert gate_settings(RunConfig()) is None and create_gate(None, None, letters) is None  # type: ignore[arg-type]
    assert without_gate(with_values(STOP, gate_rules=("digits",), top_k=5)) == run_config(top_k=5)


def test_settings_are_read_once_until_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    write_gate_file(path, GateFile(nll=1.5))
    config = run_config(gate="stop", gate_file=path)
    first = gate_settings(config)
    assert gate_settings(with_values(config, top_k=3)) is first
    write_gate_file(path, GateFile(nll=2.5))
    os.utime(path, ns=(1, 1))
    again = gate_settings(config)
    assert again is not None and again.thresholds.nll == 2.5


def test_flags_come_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    content = GateFile(nll=1.5, margin=0.3, max_hard_ratio=0.25, rules=("digits",), source={"text": "x.txt"})
    write_gate_file(path, content)
    assert read_gate_file(path) == content
    config = run_config(gate="commit", gate_file=path, gate_nll=0.5, gate_entropy=2.0)
    settings = gate_settings(config)
    assert settings is not None and settings.use is GateUse.COMMIT
    assert settings.thresholds == GateThresholds(nll=0.5, entropy=2.0, margin=0.3)
    assert settings.max_hard_ratio == 0.25 and len(settings.rules) == 1
    zero = gate_settings(with_values(config, gate_max_hard_ratio=0.0, gate_rules=("dates, amounts",)))
    assert zero is not None and zero.max_hard_ratio == 0.0 and len(zero.rules) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("entropi: 1.0", "unknown key entropi .*gate.yaml.*did you mean entropy"),
        ("nll: high", "nll .*gate.yaml.*expected a number"),
        ("margin: 1.5", "margin .*at most 1"),
        ("- nll", "expected a section of keys and values"),
        ("nll: [", "is not YAML"),
    ],
)
def test_a_file_that_is_none_is_refused_by_its_name_and_key(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        gate_settings(run_config(gate="stop", gate_file=path))


def test_a_file_without_thresholds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text("source: nothing yet\n")
    with pytest.raises(UsageError, match=r"gate\.yaml has neither a threshold nor a rule"):
        gate_settings(run_config(gate="stop", gate_file=path))


def test_thresholds_of_another_draft_and_signals_it_does_not_tell_are_refused() -> None:
    draft = PromptLookupModel(10, "")
    of_another = GateSettings(GateUse.STOP, GateThresholds(), draft_fingerprint="0123456789abcdef")
    with pytest.raises(UsageError, match=r"is for the draft 0123456789ab, this one is .*: calibrate again"):
        create_gate(of_another, draft, letters)  # type: ignore[arg-type]
    settings = GateSettings(GateUse.STOP, GateThresholds(variance=0.1))
    with pytest.raises(UsageError, match=r"a threshold of variance needs a draft .* measures no signals"):
        create_gate(settings, draft, letters)  # type: ignore[arg-type]


def test_a_token_that_was_dropped_took_its_time() -> None:
    costs = RoundCosts()
    costs.observe(RoundRecord(1, 2, 2, draft_ms=6.0, net_ms=10.0, verifier_ms=5.0, num_dropped_tokens=1))
    assert costs.estimate()[0].draft_token_s == pytest.approx((0.006 - SETTINGS.draft_call_s) / 3)


def test_keys_are_the_flags_in_files_and_variables() -> None:
    content = {"gate": "stop", "gate_entropy": 1.5, "gate_rules": ["digits", "dates"]}
    env = {"OUTRIDER_EDGE_GATE_NLL": "2", "OUTRIDER_EDGE_GATE_RULES": "amounts"}
    config = load_config(RunConfig, scope="edge", content=(content, "file x"), env=env).value
    assert (config.gate.use, config.gate.entropy, config.gate.nll) == ("stop", 1.5, 2.0)
    assert config.gate.rules == ("amounts",)
    with pytest.raises(ConfigError, match=r"gate_margin .*at most 1"):
        load_config(RunConfig, content=({"gate_margin": 2}, "file x"), env={})
