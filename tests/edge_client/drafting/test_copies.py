"""The index of contexts against its definition, earlier texts and their files, datastores, and unions' trees."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.common.errors import IncompatibleError, ModelError, UsageError
from outrider.common.tree import Tree, check_parents
from outrider.common.types import SamplingParams, TokenIds
from outrider.edge_client.commands.cli import main
from outrider.edge_client.commands.json_output import JsonOutput
from outrider.edge_client.commands.run import run
from outrider.edge_client.config.methods import check_draft_paths
from outrider.edge_client.config.run_config import default_draft_dir, run_config
from outrider.edge_client.drafting.copying.contexts import (
    MAX_MATCH,
    SEPARATOR,
    GrowingContexts,
    SortedContexts,
    TokenText,
    longest_match,
)
from outrider.edge_client.drafting.copying.datastore import Datastore, build_datastore
from outrider.edge_client.drafting.copying.earlier import MAX_OWNERS, EarlierTexts, TextsByOwner
from outrider.edge_client.drafting.copying.expander import CopyExpander
from outrider.edge_client.drafting.copying.model import TokenizerFacts
from outrider.edge_client.drafting.copying.sorting import sorted_places
from outrider.edge_client.drafting.copying.suffix import SuffixModel
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.registry import STRATEGIES, CopySettings, create_draft_model
from outrider.edge_client.drafting.tree_builder import TreeBuilder
from outrider.edge_client.drafting.trees import Continuations, TreeBudget, TreeDraft
from outrider.edge_client.session.shared_edge import create_shared_edge

IDS = st.integers(0, 3)
FACTS = TokenizerFacts(100, "fingerprint")


def sorted_contexts(texts: Sequence[Sequence[int]]) -> SortedContexts:
    ids = np.array([each for text in texts for each in (*text, SEPARATOR)], np.uint32)
    return SortedContexts(ids.tobytes(), sorted_places(ids).tolist())


def naive_followers(texts: Sequence[Sequence[int]], newest: Sequence[int]) -> tuple[int, list[int]]:
    for length in range(min(MAX_MATCH, len(newest)), 0, -1):
        run = list(newest[len(newest) - length :])
        found = [
            text[end]
            for text in texts
            for end in range(length, len(text))
            if list(text[end - length : end]) == run
        ]
        if found:
            return length, sorted(found)
    return 0, []


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.lists(IDS, min_size=1, max_size=60), min_size=1, max_size=4),
    newest=st.lists(IDS, min_size=1, max_size=50),
)
def test_a_search_finds_the_longest_run_and_all_that_followed_it(
    texts: list[list[int]], newest: list[int]
) -> None:
    own = TokenText()
    own.extend(newest)
    grown = GrowingContexts()
    for token_id in texts[0]:
        grown.extend([token_id])
    for searched, known in (([sorted_contexts(texts)], texts), ([grown], texts[:1])):
        length, places = longest_match(searched, own.context_after(()), 1000)
        found = [each.follower(end, ()) for each, ends in places for end in ends]
        assert (length, sorted(each for each in found if each is not None)) == naive_followers(known, newest)


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=60),
    st.lists(st.integers(1, 3), min_size=20, max_size=60),
    st.lists(st.integers(1, 3), max_size=12),
)
def test_searches_that_are_saved_would_have_found_nothing(
    own: list[int], earlier: list[int], path: list[int]
) -> None:
    text = GrowingContexts()
    text.extend(own)
    searched = [text, sorted_contexts([earlier])]
    saving, searching = (CopyExpander(text, searched, "suffix", 1000, min_match=4) for _ in range(2))
    for length in range(len(path) + 1):
        after = tuple(path[:length])
        assert saving.tell(after) == searching.tell(after)
        if not searching._found[after][1]:
            searching._found[after] = 1000, []  # the next one is searched whatever was found here


def test_a_run_that_must_be_too_short_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []

    def counted(*asked: object) -> object:
        searches.append(asked)
        return longest_match(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr("outrider.edge_client.drafting.copying.expander.longest_match", counted)
    text = GrowingContexts()
    text.extend([1, 2, 3, 4, 5, 6])
    expander = CopyExpander(text, [text], "suffix", 64, min_match=7)
    for length in range(14):
        assert not expander.tell(tuple(range(10, 10 + length))).token_ids
    assert len(searches) == 2, "at the root, and where six more tokens could have made a run of seven"


def test_of_many_places_a_growing_text_tells_the_newest_and_others_are_spread() -> None:
    text = [1, 2] * 50
    grown = GrowingContexts(1)
    grown.extend(text)
    one, context = TokenText(), [1]
    one.extend(context)
    assert grown.ends(one.context_after(()), 1, 3) == [99, 97, 95]
    spread = sorted_contexts([text]).ends(one.context_after(()), 1, 3)
    assert len(set(spread)) == 3 and all(text[end - 1] == 1 for end in spread)


# ------------------------------------------------------------------------------------ earlier texts


def test_earlier_texts_are_bounded_the_oldest_are_dropped_and_parts_stay_few() -> None:
    texts = EarlierTexts(500, "fingerprint")
    for number in range(60):
        texts.add([number, *range(100, 109), number])
        texts.check_integrity()
        assert len(texts.contexts) <= 4
    expander = CopyExpander(own := TokenText(), texts.contexts, "suffix", 64)
    own.extend([59, *range(100, 109)])
    assert expander.tell(()).token_ids == (59,) and expander.tell(()).source == "suffix-9-16"
    other = TokenText()
    other.extend([3, 100])
    assert CopyExpander(other, texts.contexts, "suffix", 64).tell(()).source == "suffix-1", (
        "the oldest is gone"
    )


def test_users_do_not_find_each_others_texts_and_few_are_in_memory() -> None:
    texts = TextsByOwner("fingerprint", 100)
    texts.of("one").add([1, 2, 3])
    assert not texts.of("two").contexts and texts.of("one").contexts
    for number in range(MAX_OWNERS):
        texts.of(f"another{number}")
    assert not texts.of("one").contexts, "the least recently used are dropped"


def test_the_many_users_of_one_key_leave_another_keys_in_memory() -> None:
    texts = TextsByOwner("fingerprint", 100)
    texts.of("quiet user").add([1, 2, 3])
    for number in range(3 * MAX_OWNERS):
        texts.of(f"busy {number}").add([1, 2, 3])
    assert texts.of("quiet user").contexts and texts.of(f"busy {3 * MAX_OWNERS - 1}").contexts
    assert not texts.of("busy 0").contexts and len(texts._owners) == MAX_OWNERS


def test_a_store_keeps_a_bounded_number_of_files_the_last_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.edge_client.drafting.copying.earlier.MAX_FILES", 3)
    texts = TextsByOwner("fingerprint", 100, tmp_path)
    for number in range(5):
        texts.of(f"key {number}").add([7, 8, 9])
        path = texts._path(f"key {number}")
        assert path is not None
        os.utime(path, (number, number))  # clocks of files are coarse
        texts.of("key 0").add([7, 8, 9])  # now
    assert set(tmp_path.iterdir()) == {texts._path(f"key {number}") for number in (0, 3, 4)}


def test_the_many_users_of_one_key_leave_another_keys_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.edge_client.drafting.copying.earlier.MAX_FILES", 4)
    texts = TextsByOwner("fingerprint", 100, tmp_path)
    for number, owner in enumerate(["quiet a", "quiet b", *(f"busy {number}" for number in range(9))]):
        texts.of(owner).add([7, 8, 9])
        path = texts._path(owner)
        assert path is not None
        os.utime(path, (number, number))  # clocks of files are coarse
    kept = {texts._path(owner) for owner in ("quiet a", "quiet b", "busy 7", "busy 8")}
    assert set(tmp_path.iterdir()) == kept


def test_a_store_is_read_again_by_its_user_alone_and_only_he_may_read_the_file(tmp_path: Path) -> None:
    TextsByOwner("fingerprint", 100, tmp_path / "store").of("one").add([7, 8, 9])
    (path,) = (tmp_path / "store").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    again = TextsByOwner("fingerprint", 100, tmp_path / "store")
    assert again.of("one").num_tokens == 4 and not again.of("two").contexts
    assert not TextsByOwner("another", 100, tmp_path / "store").of("one").contexts


def content_of(payload: bytes) -> bytes:
    facts = {"tokenizer": "fingerprint", "sha256": hashlib.sha256(payload).hexdigest()}
    return b"outrider-suffix-store 1\n" + json.dumps(facts).encode() + b"\n" + payload


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "foreign", "odd", "deep", "endless"])
def test_a_damaged_store_is_logged_and_begins_anew(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "texts.ids"
    EarlierTexts(100, "fingerprint", path).add([7, 8, 9])
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-3],
            "changed": content[:-9] + b"x" * 9,
            "empty": b"",
            "odd": content_of(b"abc"),
            "deep": content.replace(b"{", b"[" * 100_000),
            "endless": content_of(b"\1\0\0\0" * 50),
        }.get(damage, content)
    )
    with caplog.at_level(logging.WARNING, "outrider"):
        texts = EarlierTexts(100, "other" if damage == "foreign" else "fingerprint", path)
    assert "damaged" in caplog.text and str(path) in caplog.text
    assert not texts.contexts
    texts.add([1, 2, 3])
    assert EarlierTexts(100, texts._fingerprint, path).num_tokens == 4


def test_a_file_of_a_larger_bound_is_cut_to_the_newest(tmp_path: Path) -> None:
    EarlierTexts(100, "fingerprint", tmp_path / "texts.ids").add(range(90))
    for bound in (20, 0):
        texts = EarlierTexts(bound, "fingerprint", tmp_path / "texts.ids")
        texts.check_integrity()
        assert texts.num_tokens == bound + 1
    own = TokenText()
    own.extend([87, 88])
    assert not CopyExpander(own, texts.contexts, "suffix", 64).tell(()).token_ids


def test_a_text_ends_well_where_its_user_has_a_file_that_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = TextsByOwner("fingerprint", 100, tmp_path)
    sequence = SuffixModel(FACTS, texts, "one").sequence(SamplingParams())
    for number in range(MAX_OWNERS):
        texts.of(f"another{number}")
    path = texts._path("one")
    assert path is not None
    path.mkdir()
    with caplog.at_level(logging.WARNING, "outrider"):
        sequence.remember([1, 2, 3], 0)
    assert "cannot read" in caplog.text


def test_a_directory_that_cannot_be_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--suffix-store"):
        TextsByOwner("", 100, tmp_path / "file")


# --------------------------------------------------------------------------------------- datastores


def encode(text: str) -> list[int]:
    return [ord(each) % 50 for each in text]


NUM_TOKENS, NUM_PLACES = 29, 25  # of `datastore`


def with_header(content: bytes, **facts: float) -> bytes:
    known = {"tokenizer": "fingerprint", "num_tokens": NUM_TOKENS, "num_places": NUM_PLACES, **facts}
    return (content[:21] + json.dumps(known).encode()).ljust(4096) + content[4096:]


@pytest.fixture
def datastore(tmp_path: Path) -> Path:
    for name, text in (("a", "the quick fox\n"), ("b", "the lazy dog\n")):
        (tmp_path / name).write_text(text)
    build_datastore([tmp_path / "a", tmp_path / "b"], tmp_path / "out", encode, "fingerprint")
    return tmp_path / "out"


def test_a_datastore_tells_what_followed_in_its_files(datastore: Path) -> None:
    store, own = Datastore(datastore, "fingerprint"), TokenText()
    own.extend(encode("see the "))
    told = CopyExpander(own, [store.contexts], "retrieval", 64).tell(())
    assert (set(told.token_ids), told.source) == (set(encode("ql")), "retrieval-3-4")
    own.extend(encode("lazy dog\n"))
    assert not CopyExpander(own, [store.contexts], "retrieval", 64).tell(()).token_ids, "a file ends there"


def test_a_datastore_that_is_not_whole_or_not_its_own_is_refused_by_name(datastore: Path) -> None:
    content = datastore.read_bytes()
    with pytest.raises(IncompatibleError, match=r"--datastore .*out was built with another tokenizer"):
        Datastore(datastore, "another")
    for damaged, message in (
        (content[:-8], "truncated"),
        (b"", "cannot be read"),
        (b"x" + content[1:], "no datastore"),
        (content[:30] + b"x" * 50 + content[80:], "header"),
        (content[:-40] + b"\0" * 40, "not in order"),
        (with_header(content, num_tokens=float("inf")), "header"),
        (with_header(content, num_tokens=-5), "header"),
        (with_header(content, num_tokens=NUM_PLACES, num_places=NUM_TOKENS), "header"),
        (with_header(content, num_tokens=NUM_TOKENS - 1, num_places=NUM_PLACES + 1), "not in order"),
        (content[:21] + b"[" * 4075 + content[4096:], "header"),
    ):
        datastore.write_bytes(damaged)
        with pytest.raises(ModelError, match=rf"--datastore .*out .*{message}"):
            Datastore(datastore, "fingerprint")


def test_what_a_damaged_datastore_tells_is_left_out_where_it_is_no_token(datastore: Path) -> None:
    content = bytearray(datastore.read_bytes())
    for number in range(NUM_TOKENS - 1):
        content[4096 + 4 * number + 2] ^= 1  # one bit of each id but the separator's
    datastore.write_bytes(content)
    contexts = Datastore(datastore, "fingerprint").contexts
    own = TokenText()
    own.extend([1 << 16 | each for each in encode("see the ")])
    assert CopyExpander(own, [contexts], "retrieval", 64).tell(()).token_ids
    assert not CopyExpander(own, [contexts], "retrieval", 64, num_tokens=50).tell(()).token_ids
    assert contexts.follower(NUM_TOKENS, ()) is None and contexts.follower(10**6, ()) is None


def test_what_is_no_datastore_is_not_replaced_and_no_part_of_one_is_left(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("some text\n" * 9)
    (tmp_path / "bad").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="exists and is no datastore"):
        build_datastore([tmp_path / "text"], tmp_path / "bad", encode, "")
    with pytest.raises(UsageError, match="bad: is not UTF-8"):
        build_datastore([tmp_path / "bad"], tmp_path / "out", encode, "")
    for directory in (tmp_path, Path(".")):
        with pytest.raises(UsageError, match="is a directory: name the datastore to write last"):
            build_datastore([tmp_path / "text"], directory, encode, "")
    (tmp_path / "nothing").write_text("")
    with pytest.raises(UsageError, match="1 tokens are no datastore"):
        build_datastore([tmp_path / "nothing"], tmp_path / "out", encode, "")
    assert {each.name for each in tmp_path.iterdir()} == {"text", "bad", "nothing"}


def test_the_command_builds_what_the_strategy_opens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("def main() -> int:\n    return 0\n" * 20)
    out = tmp_path / "out"
    assert main(["draft", "datastore", "build", str(tmp_path / "text"), str(out)]) == 0
    assert "tokens" in capsys.readouterr().out
    assert main(["draft", "datastore", "build", str(tmp_path / "none"), str(out)]) == 2
    assert "none is no file" in capsys.readouterr().err
    with create_draft_model("retrieval", default_draft_dir(), copies=CopySettings(datastore=out)) as model:
        assert model.sequence(SamplingParams()).position == 0
    with pytest.raises(UsageError, match="needs --datastore FILE"):
        create_draft_model("retrieval", default_draft_dir())


# ------------------------------------------------------------------------------------------ suffixes


def test_a_chain_ends_where_its_chance_is_small_and_is_as_long_as_the_run_allows() -> None:
    model = SuffixModel(FACTS, TextsByOwner("", 1000))
    sequence = model.sequence(SamplingParams())
    sequence.commit([1, *range(10, 60), 1])
    assert len(sequence.propose(40).token_ids) <= 4, "four tokens a token of the run"
    values = NodeValues()
    sequence.use_values(values)
    for _ in range(60):  # what followed one token was never right
        draft = sequence.copy(1)[0]
        values.observe(draft, (), 99)
    assert sequence.propose(40).token_ids == ()


def test_strategies_are_listed_with_every_union() -> None:
    assert set(STRATEGIES) >= {"model", "suffix", "retrieval", "model+suffix", "model+suffix+retrieval"}


# -------------------------------------------------------------------------------------- union trees


class Copying:
    """Tells the next number after any path, below a bound."""

    num_runs = 0

    def __init__(self, last: int) -> None:
        self._last = last

    def expand(self, paths: Sequence[TokenIds]) -> list[Continuations]:
        return [self._tell(path) for path in paths]

    def _tell(self, path: TokenIds) -> Continuations:
        number = path[-1] + 1 if path else 0
        return Continuations((number,) if number < self._last else (), (0.0,)[: number < self._last], "copy")


class Drafting:
    """Tells a token, and less likely a copy's; asserts that each parent is known before its child."""

    def __init__(self) -> None:
        self.num_runs = 0
        self._known: set[TokenIds] = set()

    def expand(self, paths: Sequence[TokenIds]) -> list[Continuations]:
        self.num_runs += 1
        for path in paths:
            assert not path or path[:-1] in self._known
            self._known.add(path)
        return [Continuations((50, path[-1] + 1 if path else 0), (0.0, 0.5), "draft") for path in paths]


def test_a_copy_reaches_any_depth_in_one_run_of_the_draft() -> None:
    values = NodeValues()
    for name in ("copy", "copy!"):
        told = TreeDraft((), (), continuations=((Continuations((0,), (0.0,), name),),))
        for _ in range(300):
            values.observe(told, (), 0)
    builder = TreeBuilder(values, TreeBudget(12, 2, 4, max_copied_depth=9), copies=[Copying(9)])
    draft = builder.build([Drafting()])
    paths = {
        tuple(draft.token_ids[each] for each in Tree(draft.parents).path(n))
        for n in range(len(draft.parents))
    }
    assert tuple(range(9)) in paths and draft.num_runs == 2


@settings(max_examples=60, deadline=None)
@given(num_nodes=st.integers(1, 30), depth=st.integers(1, 8), width=st.integers(1, 3), last=st.integers(0, 9))
def test_a_union_tree_is_as_well_formed_as_any(num_nodes: int, depth: int, width: int, last: int) -> None:
    builder = TreeBuilder(NodeValues(), TreeBudget(num_nodes, depth, width), copies=[Copying(last)])
    draft = builder.build([Drafting()])
    check_parents(draft.parents, draft.token_ids, num_nodes)
    tree = Tree(draft.parents)
    assert max(tree.depths, default=-1) < depth and len(draft.continuations) == len(tree) + 1
    for node in range(len(tree)):
        assert len(list(tree.children(node))) <= width
        parent = draft.parents[node]
        assert parent < 0 or draft.values[node] <= draft.values[parent] + 1e-12


# --------------------------------------------------------------------------- flags that have no effect


@pytest.mark.parametrize(
    ("flag", "strategy", "wanted"),
    [
        ("suffix_store", "model", "suffix or staged"),
        ("suffix_store", "model+retrieval", "suffix or staged"),
        ("datastore", "model", "retrieval"),
        ("datastore", "staged+suffix", "retrieval"),
    ],
)
def test_a_file_that_the_strategy_does_not_read_is_refused_by_name(
    flag: str, strategy: str, wanted: str
) -> None:
    config = run_config(**{flag: Path("x"), "draft_strategy": strategy})
    message = rf"--{flag.replace('_', '-')} goes with .* {wanted} in it, not with {re.escape(strategy)}"
    with pytest.raises(UsageError, match=message):
        check_draft_paths(config, has_draft=True)
    with pytest.raises(UsageError, match=message):
        create_shared_edge(config)
    for reader in ("model+suffix+retrieval", "staged+retrieval"):
        known = run_config(suffix_store=Path("x"), datastore=Path("x"), draft_strategy=reader)
        check_draft_paths(known, has_draft=True)


@pytest.mark.parametrize("mode", ["cloud-only", "co-located"])
@pytest.mark.parametrize(
    ("setting", "strategy"),
    [("learn", "model"), ("suffix_store", "model+suffix"), ("datastore", "model+retrieval")],
)
def test_what_a_draft_uses_is_refused_where_none_is_loaded(
    setting: str, strategy: str, mode: str, tmp_path: Path
) -> None:
    config = run_config(mode=mode, draft_strategy=strategy, **{setting: tmp_path})
    flag = f"--{setting.replace('_', '-')}"
    with pytest.raises(UsageError, match=f"{flag} needs a draft, and mode {mode} loads none"):
        run(config, "text", None, JsonOutput())
    check_draft_paths(config, has_draft=True)  # of a daemon: a request may choose another mode
