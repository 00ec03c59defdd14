"""Rules that always escalate: what each finds, also where a word comes in several tokens."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.models import EOS, make_tokenizer

from outrider.common.errors import ConfigError, UsageError
from outrider.common.process.extras import how_to_install
from outrider.common.types import Draft, Signals
from outrider.edge_client.gate.file import GateFile, read_gate_file, write_gate_file
from outrider.edge_client.gate.gate import Gate, GateSettings, GateUse
from outrider.edge_client.gate.names import find_names
from outrider.edge_client.gate.patterns import find_amounts, find_dates, find_digits
from outrider.edge_client.gate.rules import RULES, RuleNeeds, create_rules
from outrider.edge_client.gate.text_rule import BlockText, Find
from outrider.edge_client.gate.thresholds import GateThresholds
from outrider.edge_client.gate.words import WordCounts, count_words, packed
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.models import EMBEDDED

Pieces = Sequence[str]
WORDS = count_words(["The model reads the whole text and the reader follows it"])


def found(find: Find, text: str) -> list[str]:
    return [text[start:end] for start, end in find(text, 0)]


class Pieced:
    """A decoder of a text that is cut into these tokens."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces
        self.ids = list(range(len(pieces)))

    def __call__(self, prompt_ids: list[int] | None = None) -> Callable[[int], str]:
        return lambda token_id: self.pieces[token_id]


def doubted(name: str, context: Pieces, block: Pieces, needs: RuleNeeds | None = None) -> list[str]:
    """The tokens of the block that the rule doubts."""
    decoder = Pieced(*context, *block)
    text = BlockText(decoder.ids[: len(context)], decoder)
    for token_id in decoder.ids[len(context) :]:
        text.append(token_id)
    (rule,) = create_rules([name], needs or RuleNeeds(words=WORDS, rare_per_million=0))
    return [block[index] for index in sorted(rule.hard_tokens(text))]


# ---------------------------------------------------------------------------------- what each rule finds


def test_digits_of_any_script_are_found() -> None:
    assert found(find_digits, "room 101, ٣ doors, no 2nd try") == ["101", "٣", "2"]


@pytest.mark.parametrize(
    "date",
    ["2026-11-21", "21.11.2026", "11/21/26", "12 March 2026", "3rd of May", "Sept. 5", "July 4, 1976"]
    + ["March 2026", "1984", "14:30", "Monday"],
)
def test_dates_are_found_as_a_whole(date: str) -> None:
    assert found(find_dates, f"it was {date} then") == [date]


@pytest.mark.parametrize("text", ["x = a[3:5]", "version 1.2.3", "may I", "march on", "12345", "12 marches"])
def test_what_only_looks_like_a_date_is_none(text: str) -> None:
    assert found(find_dates, text) == []


@pytest.mark.parametrize(
    "amount",
    ["$5.30", "€ 1,000", "7 €", "20 %", "3.5 GB", "12 km", "five dollars", "3 million euros"]
    + ["40°C", "2 hours"],
)
def test_amounts_are_found_as_a_whole(amount: str) -> None:
    assert found(find_amounts, f"about {amount} of it") == [amount]


@pytest.mark.parametrize("text", ["5 sheep", "x1 = 7", "chapter 3", "a dozen eggs", "$PATH"])
def test_a_number_without_a_unit_is_no_amount(text: str) -> None:
    assert found(find_amounts, text) == []


def test_names_are_capitalised_words_inside_sentences_acronyms_and_words_like_iphone() -> None:
    text = "Then we met Angela Merkel in New York. She saw J. Smith and Dr. Who, of NASA, with an iPhone."
    names = ["Angela", "Merkel", "New", "York", "Smith", "Dr", "Who", "NASA", "iPhone"]
    assert found(find_names, text) == names


def test_the_first_word_of_a_sentence_or_a_line_and_the_english_i_are_no_names() -> None:
    text = 'One. Two! Three? (Four.) "Five"\n# Six\n    Seven\n- Eight: Nine; I think I\'m here'
    assert found(find_names, text) == []


def test_what_the_light_rule_misses_and_mistakes_is_known() -> None:
    assert found(find_names, "Berlin is large. berlin too") == []
    assert found(find_names, "raise ValueError(None)") == ["ValueError", "None"]
    assert found(find_names, "der kleine Hund") == ["Hund"]


def test_words_are_rare_by_the_counts_of_a_text() -> None:
    common = WordCounts(1_000_000, {"the": 60_000, "reader": 10, "syzygy": 2}).common(10)
    assert found(common.find_others, "the reader syzygy quux x ") == ["syzygy", "quux"]
    everything = WordCounts(1_000_000, {"the": 60_000, "syzygy": 2}).common(0)
    assert found(everything.find_others, "The Syzygy quux ") == ["quux"]


def test_a_word_that_may_go_on_is_rare_where_no_common_one_begins_so() -> None:
    common = WORDS.common(0)
    assert found(common.find_others, "the rea") == []  # reads, reader
    assert found(common.find_others, "the rea ") == ["rea"]
    assert found(common.find_others, "the quu") == ["quu"]


def test_words_rarer_than_one_in_a_million_are_not_kept() -> None:
    counts = count_words(["common " * 2_000_000, "once"])
    assert counts.counts == {"common": 2_000_000} and counts.num_words == 2_000_001


# ------------------------------------------------------------------------------------- told in tokens


def test_every_token_of_a_name_is_doubted_however_it_is_cut() -> None:
    assert doubted("entities", ["we met"], [" An", "ge", "la", " today"]) == [" An", "ge", "la"]


def test_a_word_that_began_in_the_text_before_is_seen_as_a_whole() -> None:
    assert doubted("entities", ["we met", " An"], ["ge", "la", " today"]) == ["ge", "la"]
    assert doubted("rare", ["the q"], ["uux", " text"]) == ["uux"]


def test_a_single_capital_waits_for_the_rest_of_its_word() -> None:
    assert doubted("entities", ["we met"], [" B"]) == []
    assert doubted("entities", ["we met"], [" B", "ob"]) == [" B", "ob"]


def test_a_date_is_doubted_from_the_token_that_makes_it_one_back_to_its_first() -> None:
    assert doubted("dates", ["on"], [" 12", " Ma"]) == []
    assert doubted("dates", ["on"], [" 12", " Ma", "rch"]) == [" 12", " Ma", "rch"]


def test_an_amount_reaches_back_to_its_number() -> None:
    assert doubted("amounts", ["costs"], [" 5", " ", "dol", "lars", " now"]) == [" 5", " ", "dol", "lars"]


def test_digits_in_the_text_before_are_nothing_to_the_block() -> None:
    assert doubted("digits", ["room 101"], [" is", " free"]) == []


def test_a_rare_word_is_doubted_when_it_ends_if_it_began_like_a_common_one() -> None:
    assert doubted("rare", ["the"], [" read", "y"]) == [" read", "y"]  # reads, reader, but no ready
    assert doubted("rare", ["the"], [" read", "er", " reads"]) == []


def test_the_tokens_of_one_character_are_doubted_together() -> None:
    assert doubted("amounts", ["costs 5 "], ["", "", "€", " each"]) == ["", "", "€"]


def test_special_tokens_and_partial_characters_do_not_disturb(tmp_path: Path) -> None:
    """With the product's tokenizer: the bytes of a character are tokens of their own."""
    make_tokenizer(tmp_path, 320)
    tokenizer = EdgeTokenizer(tmp_path / "tokenizer.json")
    block = BlockText(tokenizer.encode(f"{EOS}it costs"), tokenizer.decoder)
    token_ids = tokenizer.encode(" 5 € each")
    for token_id in token_ids:
        block.append(token_id)
    (amounts,) = create_rules(["amounts"])
    texts = [tokenizer.token_text(token_ids[index]) for index in sorted(amounts.hard_tokens(block))]
    assert block.text == " 5 € each"
    assert "".join(texts).replace("\ufffd", "") == "5 " and len(texts) == 5


# ------------------------------------------------------------------------------------------- with a gate


def test_a_draft_ends_after_the_token_that_fires_with_it_sent() -> None:
    decoder = Pieced("room", " 1", "0", "1")
    gate = Gate(GateSettings(GateUse.STOP, GateThresholds(), rules=create_rules(["digits"])), decoder)
    rule = gate.stop_rule([])
    assert rule is not None
    signals = Signals(0.0, 0.0, 1.0)
    assert [str(rule(token_id, signals, token_id + 1).value) for token_id in (0, 1)] == ["no", "after"]


def test_one_token_that_fires_escalates_a_block_whatever_the_hard_ratio() -> None:
    decoder = Pieced("room", " 1", " is", " free")
    settings = GateSettings(GateUse.COMMIT, GateThresholds(nll=1e9), 1.0, create_rules(["digits"]))
    signals = (Signals(0.0, 0.0, 1.0),) * 4
    judgement = Gate(settings, decoder).judge(Draft((0, 1, 2, 3), (1.0,) * 4, signals), [])
    assert judgement.is_escalated and judgement.is_hard == (False, True, False, False)


# -------------------------------------------------------------------------------------- what they need


def test_rules_that_lack_something_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"unknown gate rule 'names'; known: digits, dates"):
        create_rules(["names"])
    with pytest.raises(UsageError, match=r"rare goes by how often words occur: edge-client calibrate"):
        create_rules(["rare"])
    with pytest.raises(UsageError, match=r"--gate-ner finds names for the rule entities: add it"):
        create_rules(["digits"], RuleNeeds(ner="en"))
    assert RULES == ("digits", "dates", "amounts", "entities", "rare")


def test_a_gate_file_keeps_the_counts_of_words(tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    words = WordCounts(9, {"no": 3, "null": 3, "the": 2, "straße": 1})
    write_gate_file(path, GateFile(nll=1.5, rules=("rare",), words=packed(words)))
    content = read_gate_file(path)
    assert content.word_counts == words and content.nll == 1.5 and content.rules == ("rare",)


def test_counts_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text("words: [a, b]\n")
    with pytest.raises(ConfigError, match=r"words .*: expected \{total"):
        _ = read_gate_file(path).word_counts


def test_a_recogniser_names_entities_in_place_of_the_looks_of_words(tmp_path: Path) -> None:
    spacy = pytest.importorskip("spacy")
    pipeline = spacy.blank("en")
    ruler = pipeline.add_pipe("entity_ruler")
    ruler.add_patterns([{"label": "GPE", "pattern": "new york"}, {"label": "CARDINAL", "pattern": "seven"}])
    pipeline.to_disk(tmp_path / "ner")
    needs = RuleNeeds(ner=str(tmp_path / "ner"))
    block = [" new", " yo", "rk", ",", " Bob", " and", " seven"]
    assert doubted("entities", ["in"], block, needs) == [" new", " yo", "rk"]
    spacy.blank("en").to_disk(tmp_path / "empty")
    with pytest.raises(UsageError, match=r"empty has nothing, and needs ner or entity_ruler"):
        create_rules(["entities"], RuleNeeds(ner=str(tmp_path / "empty")))
    with pytest.raises(UsageError, match=r"--gate-ner xx_none: spaCy cannot load it"):
        create_rules(["entities"], RuleNeeds(ner="xx_none"))


def test_a_missing_spacy_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "spacy", None)
    with pytest.raises(UsageError, match=re.escape(f"--gate-ner en needs spacy: {how_to_install('ner')}")):
        create_rules(["entities"], RuleNeeds(ner="en"))


def test_a_block_that_begins_within_a_character_is_judged_by_its_own_text() -> None:
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    token_ids = tokenizer.encode("room 42 is 😀 nice")
    start = next(index for index, each in enumerate(token_ids) if "\ufffd" in tokenizer.decode([each])) + 2
    block = BlockText(token_ids[:start], tokenizer.decoder)
    for token_id in token_ids[start:]:
        block.append(token_id)
    (rule,) = create_rules(["digits"])
    assert block.text == "😀 nice" and not rule.hard_tokens(block)


def test_names_are_found_where_accents_are_characters_of_their_own() -> None:
    text = unicodedata.normalize("NFD", "we met Émile and Zoë in Kraków, à propos")
    assert [unicodedata.normalize("NFC", each) for each in found(find_names, text)] == [
        "Émile",
        "Zoë",
        "Kraków",
    ]
