"""Grammars: what may follow a text is a function of the text alone, whichever way the state came there."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grammars import (
    EOS,
    NUM_TOKENS,
    SCHEMA,
    TOKENIZER,
    compiled,
    encode,
    regex,
    schema,
    vocabulary,
)
from support.models import add_token

from outrider.common.codec import decode_open, encode_open
from outrider.common.errors import InvalidFieldError
from outrider.common.grammar.masks import mask_scores
from outrider.common.grammar.state import CompiledGrammar, GrammarLimitError, GrammarState, Words, state_of
from outrider.common.grammar.vocabulary import Vocabulary
from outrider.common.sampling.processors import check_sampling_params, process_logits
from outrider.common.types import Grammar, GrammarKind, Limits, OpenRequest, SamplingParams
from outrider.kernels import reference
from outrider.kernels.host import rows as host

LARK = Grammar(GrammarKind.LARK, 'start: pair ("," pair)*\npair: /[a-z]+/ "=" NUM\nNUM: /[0-9]{1,3}/')


def fresh(grammar: Grammar, output: list[int]) -> GrammarState:
    state = state_of(grammar)
    state.extend(output)
    return state


def ids_in(words: Words) -> set[int]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def walk(grammar: Grammar, seed: int, num_tokens: int) -> list[int]:
    """Returns a random text of the grammar, possibly cut."""
    rng, output = np.random.default_rng(seed), list[int]()
    for _ in range(num_tokens):
        output.append(int(rng.choice(sorted(ids_in(fresh(grammar, output).allowed())))))
        if output[-1] == EOS:
            break
    return output


@pytest.mark.parametrize(
    "grammar", [schema(SCHEMA), LARK, regex("[ab]{2}c")], ids=["schema", "lark", "regex"]
)
def test_single_ids_are_allowed_as_masks_say(grammar: Grammar) -> None:
    """After the output and after paths, those that leave the grammar or end the text among them."""
    state, text = state_of(compiled(grammar)), walk(compiled(grammar), seed=2, num_tokens=10)
    state.extend(text[:3])
    for path in (text[3:3], text[3:5], text[3:], [*text[3:], EOS], [77]):
        allowed = ids_in(state.allowed(path))
        rng = np.random.default_rng(len(path))
        asked = {EOS, NUM_TOKENS - 1, *sorted(allowed)[:40], *rng.integers(0, NUM_TOKENS, 200).tolist()}
        assert {each for each in asked if state.allows(path, each)} == allowed & asked


def test_only_what_the_schema_allows_may_follow() -> None:
    state = state_of(compiled(schema(SCHEMA)))
    assert {vocabulary().text(each) for each in ids_in(state.allowed())} == {"{"}
    state.extend(encode('{"name":"bob","age":3'))
    assert not state.is_accepting and EOS not in ids_in(state.allowed())
    state.extend(encode("}"))
    assert state.is_accepting and ids_in(state.allowed()) == {EOS}


def test_end_of_text_is_allowed_exactly_where_the_grammar_accepts() -> None:
    grammar = compiled(regex("(ab)+"))
    for text, accepts in (("", False), ("ab", True), ("aba", False), ("abab", True)):
        state = fresh(grammar, encode(text))
        assert (EOS in ids_in(state.allowed())) is accepts is state.is_accepting


def test_after_the_end_and_after_what_is_not_allowed_only_the_end_follows() -> None:
    grammar = compiled(regex("(ab)+"))
    for output in (encode("x"), [*encode("ab"), EOS], [EOS], [*encode("ab"), EOS, *encode("ab")]):
        state = fresh(grammar, output)
        assert ids_in(state.allowed()) == ids_in(state.allowed(encode("ab"))) == {EOS}
        assert state.is_ended
    assert not fresh(grammar, [EOS]).is_accepting and fresh(grammar, [*encode("ab"), EOS]).is_accepting


@settings(max_examples=60)
@given(st.data())
def test_a_state_that_was_moved_about_equals_one_made_from_the_text_alone(data: st.DataObject) -> None:
    grammar = compiled(data.draw(st.sampled_from((schema(SCHEMA), regex("(ab|a[bc]*d)+x?"), LARK))))
    text = walk(grammar, data.draw(st.integers(0, 50)), 24)
    moved, output = state_of(grammar), list[int]()
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(("extend", "cut", "path", "follow"))):
            case "extend":
                num = data.draw(st.integers(0, 6))
                new = text[len(output) : len(output) + num]
                if data.draw(st.integers(0, 5)) == 0:
                    new = [*new, data.draw(st.sampled_from((EOS, 5, 91)))]
                output += new
                moved.extend(new)
            case "cut":
                length = data.draw(st.integers(0, len(output)))
                del output[length:]
                moved.truncate(length)
            case "path":
                path = text[len(output) :][: data.draw(st.integers(0, 5))]
                path = [*path, *data.draw(st.lists(st.sampled_from((EOS, 5, 91)), max_size=1))]
                assert ids_in(moved.allowed(path)) == ids_in(fresh(grammar, output + path).allowed())
            case "follow":
                output = text[: data.draw(st.integers(0, len(text)))]
                moved.follow(output)
        assert ids_in(moved.allowed()) == ids_in(fresh(grammar, output).allowed())
        assert moved.num_tokens == len(output)


def test_whitespace_is_compact_unless_it_is_asked_for() -> None:
    spaced = encode('{ "name" : "bob", "age": 3}')
    assert fresh(compiled(schema(SCHEMA)), spaced).is_ended
    assert fresh(compiled(replace(schema(SCHEMA), has_whitespace=True)), spaced).is_accepting


@pytest.mark.parametrize(
    ("grammar", "place"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "not a JSON schema"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[]"), "not an object"),
        (schema({"type": "strin"}), "strin"),
        (schema({"properties": {"a": {"$ref": "#/nowhere"}}}), "nowhere"),
        (regex("(ab"), "unclosed group"),
        (Grammar(GrammarKind.LARK, "start: pair\n"), "pair"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[" * 100_000), "not a JSON schema"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_place(grammar: Grammar, place: str) -> None:
    with pytest.raises(InvalidFieldError, match=place) as refusal:
        vocabulary().compile(grammar)
    assert refusal.value.field == "sampling.grammar" and len(str(refusal.value)) < 700


@pytest.mark.parametrize(
    "content",
    [
        {"const": 2**64 - 1},
        {"const": -(2**63)},  # float64 has it, and llguidance writes other digits, or crashes
        {"type": "integer", "minimum": 2**63},  # none is left
        {"enum": [1, {"a": [2**53 + 1]}]},
        {"properties": {"const": {"type": "integer", "maximum": -(2**63)}}},
        {"anyOf": [{"type": "integer", "multipleOf": 10**400 + 1}]},
    ],
)
def test_an_integer_that_float64_does_not_have_is_refused_by_name(content: dict[str, object]) -> None:
    lark = Grammar(GrammarKind.LARK, f"start: value\nvalue: %json {json.dumps(content)}")
    for grammar in (schema(content), lark):
        with pytest.raises(InvalidFieldError, match=r"\d{16}.*give it as a string"):
            vocabulary().compile(grammar)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"maximum": 2**63 - 1}, 2**63 - 1024, 2**63),  # as programs write the largest of 64 bits
        ({"maximum": 2**64 - 1, "minimum": 10**18}, 2**63 - 1024, 10**18 - 1),
        ({"minimum": -(2**63)}, -(2**63) + 1024, -(2**63) - 1),
        ({"minimum": 2**53 + 1}, 2**53 + 2, 2**53),
        ({"exclusiveMaximum": -(2**53) - 1}, -(2**53) - 4, -(2**53) - 1),
    ],
    ids=str,
)
def test_bounds_that_float64_does_not_have_are_narrowed(
    bounds: dict[str, int], inside: int, outside: int
) -> None:
    content: dict[str, object] = {"type": "integer", **bounds}
    lark = Grammar(GrammarKind.LARK, f"start: value\nvalue: %json {json.dumps(content)}\n")
    for grammar in (schema(content), lark):
        assert fresh(compiled(grammar), encode(str(inside))).is_accepting
        assert not fresh(compiled(grammar), encode(str(outside))).is_accepting


@pytest.mark.parametrize("value", [2**53, -(2**60), 10**18, 2**53 + 2])
def test_a_large_integer_that_float64_has_is_written_as_it_is(value: int) -> None:
    assert fresh(compiled(schema({"const": value})), encode(str(value))).is_accepting
    vocabulary().compile(schema({"properties": {"const": {"default": 2**64 - 1}}}))


def test_masks_that_take_more_than_a_round_may_are_refused() -> None:
    state = state_of(compiled(schema(SCHEMA)), budget_s=0.0)
    with pytest.raises(GrammarLimitError, match="in one round"):
        state.allowed()


AMBIGUOUS = Grammar(GrammarKind.LARK, 'start: (e ",")* e\ne: e e | "a" | "b"')  # of n letters 2 ** n readings


def test_reading_a_long_output_is_bounded_too_and_an_honest_one_has_the_time() -> None:
    rng, letters = np.random.default_rng(1), [encode(each)[0] for each in "ab"]
    state = state_of(compiled(AMBIGUOUS), budget_s=0.05)
    state.extend([letters[each] for each in rng.integers(0, 2, 2000)])
    start_s = time.thread_time()
    with pytest.raises(GrammarLimitError, match="the grammar t"):
        state.allowed()
    assert time.thread_time() - start_s < 1.0, "some 60 s without a bound"
    rows = {"type": "array", "items": {"type": "integer"}}
    honest = state_of(compiled(schema(rows)), budget_s=0.05)
    honest.extend(encode(json.dumps(list(range(9000)), separators=(",", ":"))))
    assert honest.num_tokens > 20_000 and not honest.is_ended


def test_a_text_that_uses_up_the_lexer_harms_no_other_of_its_grammar() -> None:
    text = {"type": "string", "pattern": "^.*(error|warning|fatal).{0,80}$"}
    used = {
        "type": "object",
        "properties": {"text": text},
        "required": ["text"],
        "additionalProperties": False,
    }
    grammar, rng = compiled(schema(used)), np.random.default_rng(1)
    assert isinstance(grammar.compiled, CompiledGrammar)
    before, states = state_of(grammar), [state_of(grammar) for _ in range(2)]
    before.allowed()
    output = encode('{"text":"')
    first = grammar.compiled.lexer()
    while grammar.compiled.lexer() is first:  # until the first lexer is used up
        output += encode(str(rng.choice(["error", "a", "bc", "fatal", "warning", "x", "yz w"])))
        states[0].follow(output)
        states[0].allowed()
        assert len(output) < 2000
    states[1].follow(output)
    for other in (before, states[1], fresh(grammar, [])):
        assert np.array_equal(other.allowed(), fresh(compiled(schema(used)), other._output).allowed())


def test_a_grammar_with_too_many_readings_is_refused_and_the_state_stays_usable() -> None:
    grammar = compiled(Grammar(GrammarKind.LARK, "start: " + " ".join(["y?"] * 600) + '\ny: "a" | "b"'))
    state = state_of(grammar)
    for _ in range(2):
        state.extend(encode("a"))
        with pytest.raises(GrammarLimitError, match="takes too much"):
            state.allowed()
        state.truncate(0)


@pytest.mark.parametrize("vocab", [8192, 8200, 8000, 31])
def test_masks_are_the_same_compiled_plain_in_numpy_and_in_torch(vocab: int) -> None:
    import torch

    rng = np.random.default_rng(0)
    words = rng.integers(-(2**31), 2**31, (3, 256), np.int64).astype(np.int32)
    words[1], words[2, ::2] = -1, 0
    scores = rng.normal(size=(3, vocab)).astype(np.float32)
    expected = scores.copy()
    reference.mask_scores(expected, words)
    for mask in (host.mask_scores, lambda each, w: mask_scores(np, each, w)):
        got = scores.copy()
        mask(got, words)
        np.testing.assert_array_equal(got, expected)
    on_torch = torch.from_numpy(scores.copy())
    mask_scores(torch, on_torch, torch.from_numpy(words))
    np.testing.assert_array_equal(on_torch.numpy(), expected)


def test_a_grammar_is_applied_before_temperature_and_truncation() -> None:
    params = SamplingParams(temperature=0.5, top_k=1, grammar=compiled(regex("x|yy")))
    logits = np.linspace(1, 0, 8192, dtype=np.float32)[None]
    scores = process_logits(np, logits, params, prompt_ids=[1], output_ids=[])
    (kept,) = np.flatnonzero(scores[0] > -np.inf)
    assert (
        kept == min(ids_in(state_of(params.grammar).allowed())) and scores[0, kept] == logits[0, kept] / 0.5
    )


def test_where_bad_words_leave_a_grammar_nothing_the_text_ends() -> None:
    words = tuple(
        (each,) for each in range(NUM_TOKENS) if vocabulary().text(each).strip() in ("a", "ab", "by")
    )
    params = SamplingParams(grammar=compiled(regex("x(ab|c)|by")), bad_words=words)
    logits = np.linspace(1, 0, 8192, dtype=np.float32)[None].repeat(3, 0)
    draft = [encode("x")[0], encode("c")[0]]
    scores = process_logits(np, logits, params, prompt_ids=[1], output_ids=[], draft_token_ids=draft)
    told = [{vocabulary().text(int(each)) for each in np.flatnonzero(row > -np.inf)} for row in scores]
    assert "x" in told[0] and "by" not in told[0] and told[1] == {"c"}
    assert np.flatnonzero(scores[2] > -np.inf).tolist() == [EOS]
    params = replace(params, grammar=compiled(regex("ab")))
    scores = process_logits(np, logits[:1], params, prompt_ids=[1], output_ids=[])
    only_b = process_logits(np, logits[:1], params, prompt_ids=[1], output_ids=encode("b"))
    assert [np.flatnonzero(each[0] > -np.inf).tolist() for each in (scores, only_b)] == [[EOS], [EOS]]


def test_each_row_is_masked_by_the_draft_before_it() -> None:
    params = SamplingParams(temperature=0, grammar=compiled(regex("[ax][by][cz]")))
    draft = [encode("a")[0], encode("b")[0]]
    scores = process_logits(
        np, np.ones((3, 8192), np.float32), params, prompt_ids=[1], output_ids=[], draft_token_ids=draft
    )
    told = [{vocabulary().text(int(each)) for each in np.flatnonzero(row > -np.inf)} for row in scores]
    assert {"a", "x"} <= told[0] and {"b", "y"} <= told[1] and told[2] == {"c", "z"}


def test_a_minimum_length_does_not_go_with_a_grammar() -> None:
    with pytest.raises(InvalidFieldError, match="min_new_tokens"):
        check_sampling_params(SamplingParams(min_new_tokens=1, grammar=regex("a")), 100)


def opening(grammar: Grammar) -> OpenRequest:
    return OpenRequest(b"s" * 16, (1, 2), 2, SamplingParams(temperature=1.0, grammar=grammar))


def test_grammars_travel_with_the_opening_within_bounds() -> None:
    limits = Limits(100, 8, 1 << 20, 8, 1000, max_grammar_bytes=300)
    sent = opening(replace(schema(SCHEMA), has_whitespace=True))
    assert decode_open(encode_open(sent), limits) == sent
    with pytest.raises(InvalidFieldError, match="301 bytes; at most 300"):
        decode_open(encode_open(opening(regex("a" * 301))), limits)
    with pytest.raises(InvalidFieldError, match="is empty"):
        decode_open(encode_open(opening(regex(""))), limits)
    raw = encode_open(sent)
    raw.sampling.grammar.kind = 77
    with pytest.raises(InvalidFieldError, match=r"sampling\.grammar: unknown value 77"):
        decode_open(raw, limits)


def test_a_compiled_grammar_equals_its_text() -> None:
    grammar = schema(SCHEMA)
    assert compiled(grammar) == grammar and hash(compiled(grammar)) == hash(grammar)
    assert json.loads(grammar.text) == SCHEMA


def test_special_tokens_that_a_model_lacks_are_in_no_mask(tmp_path: Path) -> None:
    path = Path(shutil.copy(TOKENIZER, tmp_path))
    add_token(path, NUM_TOKENS)
    state = state_of(Vocabulary.open(path, NUM_TOKENS, (EOS,)).compile(Grammar(GrammarKind.REGEX, "[ab]")))
    scores = np.zeros((1, NUM_TOKENS), np.float32)
    mask_scores(np, scores, state.allowed()[None])
    allowed = np.flatnonzero(scores[0] == 0).tolist()
    assert sorted(allowed) == sorted((encode("a")[0], encode("b")[0]))


def test_a_program_of_its_own_may_use_what_the_product_does() -> None:
    from outrider import grammar

    opened = grammar.Vocabulary.open(TOKENIZER, NUM_TOKENS, (EOS,))
    state = grammar.state_of(opened.compile(grammar.Grammar(grammar.GrammarKind.REGEX, "[ab]")))
    assert state.allows((), encode("a")[0]) and not state.allows((), encode("c")[0])
