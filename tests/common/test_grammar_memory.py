"""The memory of grammars: counted for as long as it is held, and bounded for each tenant and for all."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.grammars import compiled, encode, schema, vocabulary

from outrider.common.errors import InvalidFieldError
from outrider.common.grammar import state as state_module
from outrider.common.grammar.memory import GrammarMemory, NoGrammarRoomError
from outrider.common.grammar.state import (
    CompiledGrammar,
    GrammarBounds,
    GrammarCost,
    GrammarLimitError,
    state_of,
)
from outrider.common.types import Grammar, GrammarKind

MIB = 1 << 20
# Each space is a row of some 200 Earley items, and a token has up to 40 of them.
WIDE = Grammar(
    GrammarKind.LARK, 'start: s*\ns: " " | ' + " | ".join(f'"b{number}" "c"' for number in range(200))
)
WORDS = {"type": "string", "pattern": "^.*(error|warning|fatal).{0,80}$"}


def bounded(grammar: Grammar, memory: GrammarMemory, **cost: float) -> Grammar:
    bounds = GrammarBounds(memory=memory.of("t"))
    return vocabulary().compile(grammar, bounds, GrammarCost(**cost))  # type: ignore[arg-type]


def test_what_is_held_counts_for_its_tenant_and_for_all_until_it_is_gone() -> None:
    memory = GrammarMemory(max_bytes=1000, tenant_max_bytes=600)
    of_a = memory.of("a").hold(450)  # three quarters are for what is new
    with pytest.raises(NoGrammarRoomError, match="of this tenant"):
        memory.of("a").hold(1)
    of_b = memory.of("b").hold(300)
    with pytest.raises(NoGrammarRoomError, match="of all tenants"):
        memory.of("c").hold(1)
    of_a.resize(600)  # and the rest for what grows
    with pytest.raises(NoGrammarRoomError, match="of this tenant"):
        of_a.resize(601)
    with pytest.raises(NoGrammarRoomError, match="of all tenants"):
        of_b.resize(500)
    assert memory.num_bytes == 601 + 500, "it is held all the same, until its owner is dropped"
    of_b.resize(100)
    assert memory.num_bytes == 701
    del of_a, of_b
    assert memory.num_bytes == 0 and not memory._of_tenant


def test_what_is_kept_for_later_is_dropped_for_something_new() -> None:
    memory, dropped = GrammarMemory(max_bytes=1000, tenant_max_bytes=400), list[str | None]()
    kept = [memory.of("a").hold(150), memory.of("b").hold(300), memory.of("a").hold(150)]

    def drop(tenant: str | None) -> bool:
        dropped.append(tenant)
        return bool(kept) and kept.pop() is not None

    memory.drop_kept = drop
    held = memory.of("a").hold(300)
    assert dropped == ["a", "a", "a"] and not kept, "its own bound was in the way"
    others = [memory.of("b").hold(300), memory.of("c").hold(150)]
    with pytest.raises(NoGrammarRoomError):
        memory.of("d").hold(10)
    assert dropped[3:] == [None] and memory.num_bytes == 750
    del held, others


def test_a_text_whose_rows_fill_the_memory_ends_and_gives_it_back() -> None:
    memory = GrammarMemory(64 * MIB, 16 * MIB)
    spaces = max(
        range(8192), key=lambda each: len(vocabulary().text(each)) * vocabulary().text(each).isspace()
    )
    state = state_of(bounded(WIDE, memory))
    before = memory.num_bytes
    with pytest.raises(GrammarLimitError, match="of this tenant hold as much"):
        while state.num_tokens < 4000:  # which would take 270 MiB
            state.extend([spaces] * 8)
            state.allowed()
    assert memory.num_bytes > 16 * MIB
    state.truncate(0)
    state.allowed()
    assert memory.num_bytes == before
    del state
    assert memory.num_bytes < before


def test_a_long_text_of_a_usual_schema_holds_little() -> None:
    memory = GrammarMemory(64 * MIB, 16 * MIB)
    state = state_of(bounded(schema({"type": "array", "items": {"type": "integer"}}), memory))
    ids = encode(json.dumps(list(range(1300)), separators=(",", ":")))
    for start in range(0, len(ids), 64):
        state.extend(ids[start : start + 64])
        assert not state.is_ended
    assert state.num_tokens > 4000 and memory.num_bytes < 8 * MIB


def test_paths_of_drafts_are_counted_while_the_matcher_has_them() -> None:
    memory = GrammarMemory(64 * MIB, 16 * MIB)
    state = state_of(bounded(Grammar(GrammarKind.REGEX, "[a-z ]*"), memory))
    path = encode("the quick brown fox jumps over the lazy dog")
    for _ in range(3):
        state.allows(path, path[0])
        assert len(state._bytes_of_fed) == len(path) + 1 and sum(state._bytes_of_fed) == state._fed_bytes > 0
        state.allows((), path[0])
        assert state._fed_bytes == state._bytes_of_fed[0] and len(state._bytes_of_fed) == 1


def test_lexers_grow_as_texts_need_it_and_masks_stay_the_same() -> None:
    memory, rng = GrammarMemory(512 * MIB, 256 * MIB), np.random.default_rng(1)
    grammar = bounded(schema(WORDS), memory)
    assert isinstance(grammar.compiled, CompiledGrammar)
    states, plain = [state_of(grammar), state_of(grammar)], state_of(compiled(schema(WORDS)))
    output, sizes = encode('"'), list[int]()
    while sizes != [500, 3_000, 20_000]:
        output += encode(str(rng.choice(["error", "a", "bc", "fatal", "warning", "x", "yz w"])))
        for each in (states[0], plain):
            each.follow(output)
        assert np.array_equal(states[0].allowed(), plain.allowed())
        if (size := grammar.compiled.lexer().num_states) not in sizes:
            sizes.append(size)
        assert len(output) < 1000
    states[1].follow(output)
    assert np.array_equal(states[1].allowed(), plain.allowed()), "it goes from the first lexer to the last"
    held = grammar.compiled.lexer().held
    assert held is not None
    of_states = [each._held.num_bytes for each in states if each._held is not None]
    assert memory.num_bytes == held.num_bytes + sum(of_states), "the smaller lexers are gone"


def test_a_lexer_without_room_to_grow_ends_the_text() -> None:
    memory = GrammarMemory(512 * MIB, 2 * MIB)
    state = state_of(bounded(schema(WORDS), memory))
    with pytest.raises(GrammarLimitError, match="of this tenant hold as much"):
        while state.num_tokens < 1000:
            state.extend(encode("error " if state.num_tokens else '"'))
            state.allowed()


def test_a_grammar_that_takes_long_to_compile_is_not_compiled_within_a_round() -> None:
    bounds, num_made = GrammarBounds(budget_s=0.05), 0

    def make(cost: GrammarCost) -> CompiledGrammar:
        def make_matcher(_: int) -> object:
            nonlocal num_made
            num_made += 1
            return object()

        return CompiledGrammar(make_matcher, 32, (0,), len, bounds, cost)  # type: ignore[arg-type]

    quick, slow = make(GrammarCost(compile_s=0.01)), make(GrammarCost(compile_s=0.06))
    first = quick.lexer()
    quick.renew(first)
    quick.renew(first)  # another sequence found it used up too
    assert num_made == 3 and quick.lexer() is not first and not quick.is_used_up
    with pytest.raises(GrammarLimitError, match="60 ms to compile again"):
        slow.renew(slow.lexer())
    assert num_made == 3 and slow.is_used_up


@pytest.mark.parametrize("sizes", [(50,), (50, 20_000)], ids=["as-large", "larger"])
def test_a_new_lexer_takes_a_rounds_own_time_unless_it_is_larger(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(state_module.time, "thread_time", lambda: now_s)
    monkeypatch.setattr(state_module, "_LEXER_STATES", sizes)
    memory = GrammarMemory(512 * MIB, 256 * MIB)
    grammar = vocabulary().compile(schema(WORDS), GrammarBounds(0.05, memory.of("t"))).compiled
    assert isinstance(grammar, CompiledGrammar)
    make = grammar._make_matcher

    def slow(num_states: int) -> object:
        nonlocal now_s
        now_s += 0.04
        return make(num_states)

    grammar._make_matcher = slow
    state = state_of(Grammar(GrammarKind.JSON_SCHEMA, "", compiled=grammar))
    state._spent_s = 0.03
    state.extend(encode('"error fatal warning error'))
    if len(sizes) == 1:
        with pytest.raises(GrammarLimitError, match="70 ms in one round"):
            state.allowed()
    else:
        state.allowed()
        assert state._spent_s == pytest.approx(0.03)
    assert now_s == 0.04 and grammar.lexer().num_states == sizes[-1]


def test_a_grammar_too_large_for_its_tenant_is_not_compiled() -> None:
    memory = GrammarMemory(64 * MIB, 16 * MIB)
    with pytest.raises(NoGrammarRoomError):
        bounded(schema(WORDS), memory, num_bytes=20 * MIB)
    assert memory.num_bytes == 0
    with pytest.raises(InvalidFieldError):
        bounded(Grammar(GrammarKind.REGEX, "("), memory)
    assert memory.num_bytes == 0
