"""Each of the 24 fields: honoured, without effect for a reason, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider import DraftStrategy, SpeculativeConfig, SpeculativeDecoder, TreeStrategy
from outrider.common.types import EARLY_EXIT
from outrider.decoder.fields import FIELDS, OF_CALLS, judge_fields
from outrider.decoder.parts import call_settings, make_client_config, make_draft, make_serve_config, num_nodes
from outrider.decoder.sources import Site
from outrider.models import EMBEDDED

DEFAULTS = {
    "draft_strategy": "small_model",
    "draft_model_path": None,
    "draft_num_layers": None,
    "draft_quant_dtype": None,
    "num_speculative_tokens": 4,
    "max_speculative_tokens": 8,
    "min_speculative_tokens": 2,
    "adaptive_depth": True,
    "target_acceptance_rate": 0.7,
    "tree_strategy": "none",
    "tree_width": 2,
    "tree_depth": 3,
    "share_kv_cache": True,
    "reuse_draft_kv": True,
    "kv_compression": False,
    "verify_in_parallel": True,
    "early_rejection": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "prefill_with_verify": True,
    "fuse_draft_verify": False,
    "use_cuda_graph": False,
    "log_acceptance_rate": True,
    "log_speedup": True,
}
HERE = Site(EMBEDDED / "target", "cpu")
ON_CUDA = Site(EMBEDDED / "target", "cuda")
THERE = Site(None, "cpu", ("lookahead", EARLY_EXIT), "float32")
PLAIN = Site(None, "cpu", (), "fp8")
HONOURED = ""
PREFIX: dict[str, Any] = {"draft_strategy": "prefix_layers", "draft_num_layers": 2}

# field, its value, other fields, where, and what becomes of it: honoured, or words of the reason.
KEPT: list[tuple[str, object, dict[str, Any], Site, str]] = [
    ("draft_strategy", "small_model", {}, HERE, HONOURED),
    ("draft_strategy", "lookahead", {}, THERE, HONOURED),
    ("draft_model_path", EMBEDDED / "draft", {}, HERE, HONOURED),
    ("draft_model_path", EMBEDDED, {"draft_strategy": "lookahead"}, HERE, "no weights"),
    ("draft_model_path", EMBEDDED, {"draft_strategy": "ngram"}, HERE, "tokenizer.json"),
    ("draft_model_path", EMBEDDED, {"draft_strategy": "lookahead"}, THERE, "tokenizer.json"),
    ("draft_num_layers", 2, {"draft_strategy": "prefix_layers"}, HERE, HONOURED),
    ("draft_num_layers", 2, {"draft_strategy": "prefix_layers"}, THERE, "the verifier's own early exit"),
    ("draft_quant_dtype", "int4", {}, HERE, HONOURED),
    ("draft_quant_dtype", "fp8", {"draft_strategy": "quantized"}, HERE, HONOURED),
    ("num_speculative_tokens", 6, {}, HERE, HONOURED),
    ("num_speculative_tokens", 16, {"adaptive_depth": False}, HERE, HONOURED),
    ("num_speculative_tokens", 6, {"tree_strategy": "tree"}, HERE, "tree_width"),
    ("max_speculative_tokens", 9, {}, HERE, HONOURED),
    ("max_speculative_tokens", 9, {"adaptive_depth": False}, HERE, "adaptive_depth is off"),
    ("min_speculative_tokens", 1, {}, HERE, HONOURED),
    ("min_speculative_tokens", 1, {"adaptive_depth": False}, HERE, "adaptive_depth is off"),
    ("adaptive_depth", True, {}, HERE, HONOURED),
    ("adaptive_depth", True, {"tree_strategy": "tree"}, HERE, "size is given"),
    ("target_acceptance_rate", 0.5, {}, HERE, HONOURED),
    ("target_acceptance_rate", 0.5, {"adaptive_depth": False}, HERE, "adaptive_depth is off"),
    ("tree_strategy", "tree", {}, HERE, HONOURED),
    ("tree_strategy", "linear", {}, HERE, HONOURED),
    ("tree_width", 3, {"tree_strategy": "tree"}, HERE, HONOURED),
    ("tree_width", 3, {"tree_strategy": "linear"}, HERE, "tree_strategy is linear"),
    ("tree_depth", 5, {"tree_strategy": "tree"}, HERE, HONOURED),
    ("tree_depth", 5, {}, HERE, "tree_strategy is none"),
    ("share_kv_cache", True, PREFIX, HERE, HONOURED),
    ("share_kv_cache", False, PREFIX, HERE, HONOURED),
    ("share_kv_cache", True, PREFIX, ON_CUDA, "own copy"),
    ("share_kv_cache", True, {}, HERE, "KV of its own"),
    ("share_kv_cache", True, {"draft_strategy": "ngram"}, HERE, "no KV"),
    ("reuse_draft_kv", False, {}, HERE, HONOURED),
    ("reuse_draft_kv", True, {"draft_strategy": "medusa"}, HERE, "between texts"),
    ("kv_compression", True, {"draft_strategy": "quantized"}, HERE, HONOURED),
    ("kv_compression", True, PREFIX, HERE, HONOURED),
    ("kv_compression", True, {"draft_strategy": "medusa"}, HERE, "no KV"),
    ("verify_in_parallel", True, {}, HERE, HONOURED),
    ("early_rejection", True, {}, HERE, HONOURED),
    ("temperature", 0.0, {}, HERE, HONOURED),
    ("top_p", 0.5, {}, HERE, HONOURED),
    ("prefill_with_verify", True, {}, HERE, HONOURED),
    ("fuse_draft_verify", True, {"draft_strategy": "medusa"}, HERE, HONOURED),
    ("fuse_draft_verify", True, {"draft_strategy": "lookahead"}, THERE, HONOURED),
    ("fuse_draft_verify", False, {"draft_strategy": "medusa"}, HERE, "always drafts from"),
    ("use_cuda_graph", True, {}, ON_CUDA, HONOURED),
    ("use_cuda_graph", False, {}, ON_CUDA, "replays"),
    ("log_acceptance_rate", False, {}, HERE, HONOURED),
    ("log_speedup", False, {}, HERE, HONOURED),
]
# field, its value, other fields, where, and words of the refusal.
REFUSED: list[tuple[str, object, dict[str, Any], Site, str]] = [
    ("draft_strategy", "guessing", {}, HERE, "draft_strategy is 'guessing'.*small_model, quantized"),
    ("draft_strategy", "medusa", {}, THERE, "that verifier drafts with lookahead, early_exit.*--heads"),
    ("draft_strategy", "lookahead", {}, PLAIN, "that verifier drafts with nothing.*--lookahead"),
    ("draft_model_path", "/nowhere", {}, HERE, "no such directory"),
    ("draft_model_path", None, {"draft_strategy": "quantized"}, THERE, "not here: name a directory"),
    ("draft_model_path", None, {"draft_strategy": "eagle"}, HERE, "eagle needs a directory"),
    ("draft_num_layers", None, {"draft_strategy": "prefix_layers"}, HERE, "give a number"),
    ("draft_num_layers", 0, {"draft_strategy": "prefix_layers"}, HERE, "from 1"),
    ("draft_num_layers", 2, {}, HERE, "goes with draft_strategy prefix_layers"),
    ("draft_quant_dtype", "int3", {}, HERE, "int4, fp8 or None"),
    ("draft_quant_dtype", "fp8", {}, HERE, "that draft was exported in int4"),
    ("draft_quant_dtype", "fp8", PREFIX | {"share_kv_cache": False}, HERE, "in INT4"),
    ("draft_quant_dtype", "int4", PREFIX, HERE, "the target's own"),
    ("draft_quant_dtype", "int4", {"draft_strategy": "ngram"}, HERE, "with ngram there is no draft model"),
    ("num_speculative_tokens", 0, {}, HERE, "want 1 to 64"),
    ("num_speculative_tokens", 16, {}, HERE, "between 2 and 8"),
    ("draft_model_path", 5, {}, HERE, "want the path of a directory"),
    ("num_speculative_tokens", "four", {}, HERE, "want int"),
    ("max_speculative_tokens", 1, {}, HERE, "want min_speculative_tokens, 2, to 64"),
    ("min_speculative_tokens", 0, {}, HERE, "want at least 1"),
    ("adaptive_depth", 1, {}, HERE, "want bool"),
    ("target_acceptance_rate", 70.0, {}, HERE, "from 0 to 1"),
    ("tree_strategy", "bush", {}, HERE, "none, linear, tree"),
    ("tree_strategy", "tree", {"draft_strategy": "early_exit", "draft_num_layers": 1}, HERE, "chains"),
    ("tree_width", 9, {}, HERE, "want 1 to 8"),
    ("tree_depth", 0, {}, HERE, "want 1 to 64"),
    ("share_kv_cache", False, {"draft_strategy": "early_exit", "draft_num_layers": 1}, HERE, "prefix_layers"),
    ("reuse_draft_kv", None, {}, HERE, "want bool"),
    ("kv_compression", True, {}, HERE, "float32: name a Hugging Face directory"),
    ("kv_compression", True, {"draft_strategy": "early_exit"}, THERE, "--kv-dtype fp8"),
    ("verify_in_parallel", False, {}, HERE, "one forward verifies a whole draft"),
    ("early_rejection", False, {}, HERE, "nothing after a rejected token"),
    ("temperature", "hot", {}, HERE, "want float"),
    ("top_p", True, {}, HERE, "want float"),
    ("prefill_with_verify", False, {}, HERE, "share the target's forwards"),
    ("fuse_draft_verify", True, {}, HERE, "a forward of its own"),
    ("use_cuda_graph", True, {}, HERE, "needs CUDA, and the target runs on the cpu"),
    ("log_acceptance_rate", "yes", {}, HERE, "want bool"),
    ("log_speedup", 0, {}, HERE, "want bool"),
]


def test_the_names_and_defaults_are_those_that_were_given() -> None:
    assert {
        each.name: getattr(SpeculativeConfig(), each.name) for each in fields(SpeculativeConfig)
    } == DEFAULTS
    assert list(FIELDS) == list(DEFAULTS) and len(DEFAULTS) == 24
    assert {name for name, *_ in KEPT} == {name for name, *_ in REFUSED} == set(DEFAULTS), "each has tests"
    strategies = "small_model quantized prefix_layers medusa ngram eagle hydra early_exit lookahead"
    assert {*DraftStrategy} == {*strategies.split(), "suffix", "retrieval", "staged"}
    assert {*TreeStrategy} == {"none", "linear", "tree"}


@pytest.mark.parametrize(("name", "value", "others", "site", "words"), KEPT)
def test_a_field_is_honoured_or_has_no_effect_for_a_reason(
    name: str, value: object, others: dict[str, Any], site: Site, words: str
) -> None:
    _, no_effect = judge_fields(SpeculativeConfig(**(others | {name: value})), site)
    assert (name in no_effect) is bool(words)
    assert words in no_effect.get(name, "")


@pytest.mark.parametrize(("name", "value", "others", "site", "words"), REFUSED)
def test_a_field_is_refused_by_name(
    name: str, value: object, others: dict[str, Any], site: Site, words: str
) -> None:
    with pytest.raises(outrider.ConfigError, match=words) as raised:
        judge_fields(SpeculativeConfig(**(others | {name: value})), site)
    assert name in str(raised.value)


@pytest.mark.parametrize("name", ["suffix", "retrieval", "staged"])
def test_strategies_work_as_soon_as_the_edge_has_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.decoder.sources.STRATEGIES", ("model",))
    with pytest.raises(outrider.ConfigError, match=f"no --draft-strategy {name}"):
        judge_fields(SpeculativeConfig(name), HERE)
    monkeypatch.setattr("outrider.decoder.sources.STRATEGIES", ("model", name))
    assert judge_fields(SpeculativeConfig(name), HERE)[0].strategy == name


# ------------------------------------------------------------------- what is made of what is honoured


def made(site: Site, folder: Path, **values: Any) -> tuple[Any, Any, Any]:
    """The draft, the client's configuration, and in this process the verifier's."""
    config = SpeculativeConfig(**values)
    source, _ = judge_fields(config, site)
    draft = make_draft(config, source, site, folder / "draft")
    client = make_client_config(config, source, site, draft, "127.0.0.1:1")
    return draft, client, make_serve_config(config, source, site, folder) if site.is_local else None


def test_drafts_are_kept_as_asked(tiny: Path, tiny_draft: Path, tmp_path: Path) -> None:
    site = Site(tiny, "cpu")
    draft, client, serve = made(site, tmp_path, draft_model_path=tiny_draft)
    assert (draft.directory, client.mode, serve.draft, serve.heads) == (tiny_draft, "speculative", "none", ())
    cases: list[tuple[dict[str, Any], tuple[str, str, str]]] = [
        ({"draft_strategy": "quantized"}, ("onnx", "auto", "auto")),
        ({"draft_strategy": "quantized", "draft_quant_dtype": "fp8"}, ("torch", "fp8", "auto")),
        ({"draft_strategy": "quantized", "kv_compression": True}, ("torch", "nf4", "fp8")),
        ({"draft_model_path": tiny}, ("torch", "auto", "auto")),
        ({"draft_model_path": tiny, "draft_quant_dtype": "int4"}, ("onnx", "auto", "auto")),
    ]
    for values, wanted in cases:
        _, client, _ = made(site, tmp_path, **values)
        assert (client.draft.backend, client.draft.weights, client.draft.kv_dtype) == wanted, values


def test_kv_of_the_draft_is_reused_or_not(tiny: Path, tiny_draft: Path, tmp_path: Path) -> None:
    caches = [
        made(Site(tiny, "cpu"), tmp_path, draft_model_path=tiny_draft, reuse_draft_kv=each)[1]
        for each in (True, False)
    ]
    assert [each.serve.draft_cache_mb for each in caches] == [256.0, 0.0]


def test_first_layers_draft_on_the_targets_kv_or_on_their_own(tiny: Path, tmp_path: Path) -> None:
    values = {"draft_strategy": "prefix_layers", "draft_num_layers": 2}
    _, client, serve = made(Site(tiny, "cpu"), tmp_path, **values, kv_compression=True)
    assert (client.mode, client.draft_source, serve.kv_dtype) == ("co-located", "early_exit", "fp8")
    assert '"layers": [0, 1]' in (Path(serve.heads[0]) / "config.json").read_text()
    draft, client, serve = made(Site(tiny, "cpu"), tmp_path, **values, share_kv_cache=False)
    assert (client.mode, serve.heads, draft.directory) == ("speculative", (), tmp_path / "draft")


def test_heads_of_the_verifier_are_asked_for(tmp_path: Path) -> None:
    _, client, serve = made(HERE, tmp_path, draft_strategy="hydra")
    assert (client.draft_source, serve.heads) == ("hydra", (str(EMBEDDED / "heads" / "hydra"),))
    _, client, serve = made(HERE, tmp_path, draft_strategy="lookahead")
    assert (client.draft_source, serve.lookahead) == ("lookahead", True)


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ({"tree_strategy": "none"}, {"num_speculative_tokens": 5}),
        ({"tree_strategy": "linear"}, {"num_speculative_tokens": 5}),
        (
            {"tree_strategy": "tree", "tree_width": 3, "tree_depth": 2},
            {"tree": 12, "tree_width": 3, "tree_depth": 2},
        ),
    ],
)
def test_drafts_have_the_shape_that_is_asked_for(values: dict[str, Any], settings: dict[str, Any]) -> None:
    config = SpeculativeConfig(temperature=0.5, top_p=0.25, **values)
    assert call_settings(config, 5) == {"temperature": 0.5, "top_p": 0.25} | settings
    assert num_nodes(8, 64) == 1024, "no larger tree may be asked for"


# ------------------------------------------------------------------------------------- in a decoder

PROMPT = list(range(40, 60))


class Watched(SpeculativeDecoder):
    """Keeps the statistics of its last generation."""

    last_rounds: list[Any]

    def _decode(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._decode(*args, **kwargs)
        self.last_rounds = found[0].session.result.stats.rounds
        return found


@pytest.fixture(scope="module")
def watched(tiny: Path) -> Any:
    """A decoder whose draft is the target itself."""
    with Watched() as decoder:
        decoder.setup(tiny, SpeculativeConfig(draft_model_path=tiny, temperature=0.0), device="cpu")
        yield decoder


@pytest.fixture
def drafted(watched: Watched, tiny: Path) -> Callable[..., list[int]]:
    def decode(num_new: int = 60, **values: Any) -> list[int]:
        config = SpeculativeConfig(**({"draft_model_path": tiny, "temperature": 0.0} | values))
        watched.decode_step(PROMPT, num_new, config, seed=2)
        return [each.num_draft_tokens for each in watched.last_rounds][:-1]

    return decode


def test_without_adaptive_depth_drafts_have_the_length_that_is_asked_for(
    drafted: Callable[..., list[int]], watched: Watched
) -> None:
    assert set(drafted(num_speculative_tokens=3, adaptive_depth=False)) == {3}
    assert watched.adjust_speculative_depth(1.0) == 4
    assert set(drafted(num_speculative_tokens=3, adaptive_depth=False)) == {4}, "by hand"


def test_with_it_the_length_follows_acceptance_from_round_to_round(drafted: Callable[..., list[int]]) -> None:
    sizes = drafted(num_speculative_tokens=3, max_speculative_tokens=6, min_speculative_tokens=2)
    assert sizes[:5] == [3, 4, 5, 6, 6], "every draft is right"
    steady = drafted(num_speculative_tokens=3, max_speculative_tokens=6, target_acceptance_rate=1.0)
    assert set(steady) == {3}, "what is wanted"


def test_a_tree_has_its_width_and_depth(drafted: Callable[..., list[int]], watched: Watched) -> None:
    assert set(drafted(num_new=24, tree_strategy="tree", tree_width=2, tree_depth=2)) == {6}
    with pytest.raises(outrider.ConfigError, match="tree_strategy"):
        drafted(tree_strategy="bush")


def test_a_call_cannot_change_what_setup_loaded(drafted: Callable[..., list[int]]) -> None:
    assert len(OF_CALLS) + 7 == 24
    with pytest.raises(outrider.ConfigError, match="reuse_draft_kv is False and was True in setup"):
        drafted(reuse_draft_kv=False)
    with pytest.raises(outrider.ConfigError, match="early_rejection"):
        drafted(early_rejection=False)
    with pytest.raises(outrider.UsageError, match="temperature"):
        drafted(temperature=-1.0)
    with pytest.raises(outrider.UsageError, match="top_p"):
        drafted(top_p=3.0)


def test_the_length_of_the_verifiers_drafts_changes_between_calls(tiny: Path) -> None:
    config = SpeculativeConfig("early_exit", draft_num_layers=1, temperature=0.0, target_acceptance_rate=1.0)
    with Watched() as decoder:
        decoder.setup(tiny, config, device="cpu")
        decoder.decode_step(PROMPT, 30, seed=2)
        first = {each.num_draft_tokens for each in decoder.last_rounds[:10]}
        decoder.decode_step(PROMPT, 30, seed=2)
        second = {each.num_draft_tokens for each in decoder.last_rounds[:10]}
    assert (first, second) == ({4}, {2}), "one layer is seldom right"


@pytest.mark.parametrize("policy", ["edge_only", "first_token"])
def test_the_text_is_the_targets_whatever_the_environment_tells_other_clients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str
) -> None:
    monkeypatch.setenv("OUTRIDER_EDGE_ON_TIMEOUT", policy)
    config = SpeculativeConfig()
    source, _ = judge_fields(config, HERE)
    draft = make_draft(config, source, HERE, tmp_path / "draft")
    client = make_client_config(config, source, HERE, draft, "in-process")
    assert str(client.outage.on_timeout) == "wait"
