"""`SpeculativeDecoder`: cloud-only's text by every strategy, here and remotely; statistics; an orderly end."""

from __future__ import annotations

import logging
import math
import os
import threading
from pathlib import Path

import pytest
from support.calls import eventually

import outrider
from outrider import SpeculativeConfig, SpeculativeDecoder
from outrider.decoder.decoder import NUM_TURNS, _InCaller
from outrider.edge_client.session.shared_edge import Prepared

PROMPT = [5, 6, 7, 8, 9] * 4


def alone(target: Path | str, seed: int, num_new: int = 24, **sampling: object) -> list[int]:
    """The text of the target alone, by the client that everybody uses."""
    with SpeculativeDecoder() as decoder:
        decoder.setup(target, SpeculativeConfig(draft_strategy="ngram"), device="cpu")
        connection = decoder._running.connection  # type: ignore[union-attr]
        prepared = connection.prepare(
            PROMPT, {"mode": "cloud-only", "max_new_tokens": num_new, "seed": seed, **sampling}
        )
        connection.start(prepared, _InCaller)
        return list(prepared.session.result.token_ids)


@pytest.fixture(scope="module")
def wanted(tiny: Path) -> list[int]:
    return alone(tiny, 3, temperature=1.0)


LOCAL = {
    "a small model": {"draft_model_path": "exported"},
    "a small model in torch": {"draft_model_path": "target"},
    "its own weights in INT4": {"draft_strategy": "quantized"},
    "its own weights in FP8": {"draft_strategy": "quantized", "draft_quant_dtype": "fp8"},
    "first layers on its KV": {"draft_strategy": "prefix_layers", "draft_num_layers": 2},
    "first layers of their own": {
        "draft_strategy": "prefix_layers",
        "draft_num_layers": 2,
        "share_kv_cache": False,
    },
    "early exit": {"draft_strategy": "early_exit", "draft_num_layers": 1},
    "lookahead trees": {"draft_strategy": "lookahead", "tree_strategy": "tree"},
    "trees of n-grams": {"draft_strategy": "ngram", "tree_strategy": "tree"},
    "small trees": {"draft_model_path": "exported", "tree_strategy": "tree", "tree_width": 3},
}


@pytest.mark.parametrize("name", LOCAL)
def test_the_text_is_the_targets_own_whatever_drafts_in_this_process(
    tiny: Path, tiny_draft: Path, wanted: list[int], name: str
) -> None:
    places = {"exported": tiny_draft, "target": tiny}
    fields = {
        key: places.get(str(value), value) if key == "draft_model_path" else value
        for key, value in LOCAL[name].items()
    }
    with SpeculativeDecoder() as decoder:
        decoder.setup(tiny, SpeculativeConfig(**fields), device="cpu")  # type: ignore[arg-type]
        tokens, stats = decoder.decode_step(PROMPT, 24, seed=3)
        assert tokens == wanted
        assert set(stats) == {"acceptance_rate", "speedup", "draft_latency", "verify_latency"}
        report = decoder.report()
        engine = decoder._running.verifier.engine  # type: ignore[union-attr]
        engine.check_integrity()
        assert engine.num_sessions == 0
        assert report["num_tokens"] == 24 and report["where"] == "in-process"
        assert (report["num_draft_tokens"] > 0) is not math.isnan(stats["acceptance_rate"])  # type: ignore[operator]


@pytest.mark.parametrize(
    "fields",
    [
        {"draft_model_path": "exported"},
        {"draft_strategy": "ngram", "draft_model_path": "exported"},
        {"draft_strategy": "lookahead", "draft_model_path": "exported", "tree_strategy": "tree"},
        {"draft_strategy": "early_exit", "draft_model_path": "exported"},
        {"draft_strategy": "prefix_layers", "draft_model_path": "exported"},
        {"draft_strategy": "quantized", "draft_model_path": "target"},
    ],
)
def test_a_remote_verifier_gives_the_same_text(
    tiny: Path, tiny_draft: Path, remote: str, wanted: list[int], fields: dict[str, object]
) -> None:
    places = {"exported": tiny_draft, "target": tiny}
    # Where the verifier drafts, a tokenizer is needed here, which a draft's directory has.
    path = places[str(fields["draft_model_path"])]
    config = SpeculativeConfig(**{**fields, "draft_model_path": path})  # type: ignore[arg-type]
    with SpeculativeDecoder() as decoder:
        decoder.setup(remote, config)
        assert decoder.decode_step(PROMPT, 24, seed=3)[0] == wanted
        assert decoder.report()["where"] == remote.removeprefix("grpc://")
        with pytest.raises(outrider.UsageError, match="kv_pool"):
            _ = decoder.kv_pool


def test_a_draft_of_another_tokenizer_is_refused_by_setup(tiny: Path) -> None:
    with pytest.raises(outrider.IncompatibleError, match="draft_model_path"):
        SpeculativeDecoder().setup(tiny, SpeculativeConfig(), device="cpu")


def test_a_speedup_is_measured_when_asked_for(
    embedded: SpeculativeDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    config = SpeculativeConfig(temperature=0.0)
    fresh = SpeculativeDecoder()
    with pytest.raises(outrider.ClosedError, match="setup"):
        fresh.decode_step(PROMPT, 4)
    first = embedded.decode_step(PROMPT, 16, config, seed=1)
    assert math.isnan(first[1]["speedup"])
    assert math.isnan(embedded.report()["speedup"])  # type: ignore[arg-type]
    assert embedded.report(baseline=True)["speedup"] > 0  # type: ignore[operator]
    with caplog.at_level(logging.INFO, "outrider"):
        second = embedded.decode_step(PROMPT, 16, config, seed=1)
        assert second[0] == first[0] and second[1]["speedup"] > 0
        assert "drafted tokens" in caplog.text and "as fast as the target alone" in caplog.text
        caplog.clear()
        silent = SpeculativeConfig(temperature=0.0, log_acceptance_rate=False, log_speedup=False)
        embedded.decode_step(PROMPT, 4, silent, seed=1)
        assert "drafted" not in caplog.text and "as fast" not in caplog.text


def test_the_turns_of_a_baseline_do_not_copy_the_text_that_they_decode_again(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SpeculativeConfig("suffix", adaptive_depth=False)
    with SpeculativeDecoder() as decoder:
        decoder.setup(tiny, config, device="cpu")
        decode, seen = decoder._decode, []

        def recorded(*arguments: object) -> tuple[Prepared, float]:
            prepared, seconds = decode(*arguments)  # type: ignore[arg-type]
            rounds = prepared.session.result.stats.rounds
            seen.append(sum(each.num_accepted_tokens for each in rounds))
            return prepared, seconds

        monkeypatch.setattr(decoder, "_decode", recorded)
        decoder.decode_step(PROMPT, 48, seed=3)
        decoder.report(baseline=True)
        first, *turns = seen
        assert turns == [first, 0] * NUM_TURNS or turns == [0, first] * NUM_TURNS
        decoder.decode_step(PROMPT, 48, seed=3)
        assert seen[-1] > first, "asked again, the text is copied: the figure above can tell"


def test_a_baseline_needs_a_prompt(tiny: Path) -> None:
    with SpeculativeDecoder() as decoder:
        decoder.setup(tiny, SpeculativeConfig("ngram"), device="cpu")
        assert math.isnan(decoder.get_acceptance_rate())
        with pytest.raises(outrider.UsageError, match="decode_step first"):
            decoder.report(baseline=True)


def test_drafts_alone_count_as_accepted(tiny: Path) -> None:
    """A draft that is the target itself is always right at temperature 0; corrections and bonus are no drafts."""
    config = SpeculativeConfig(draft_model_path=tiny, temperature=0.0)
    with SpeculativeDecoder() as decoder:
        decoder.setup(tiny, config, device="cpu")
        tokens, stats = decoder.decode_step(PROMPT, 24, seed=1)
        assert stats["acceptance_rate"] == decoder.get_acceptance_rate() == 1.0
        report = decoder.report()
        assert report["num_accepted_tokens"] + report["num_rounds"] + 1 == len(tokens)  # type: ignore[operator]


def test_nothing_is_left_behind(tiny: Path, tiny_draft: Path) -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    decoder = SpeculativeDecoder()
    decoder.setup(tiny, SpeculativeConfig("prefix_layers", draft_num_layers=1), device="cpu")
    folder = decoder._running.folder  # type: ignore[union-attr]
    assert folder.is_dir()
    decoder.decode_step(PROMPT, 8, seed=1)
    decoder.close()
    decoder.close()
    assert not folder.exists()
    assert eventually(lambda: threading.active_count() <= threads)
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= files)
    with pytest.raises(outrider.ClosedError):
        decoder.decode_step(PROMPT, 8)


def test_setup_that_fails_leaves_nothing_behind(tiny: Path) -> None:
    threads = threading.active_count()
    with SpeculativeDecoder() as decoder:
        with pytest.raises(outrider.ConfigError, match="early_rejection=False is refused"):
            decoder.setup(tiny, SpeculativeConfig(early_rejection=False), device="cpu")
        with pytest.raises(outrider.ModelError, match="hf download nobody/nothing"):
            decoder.setup("nobody/nothing")
        with pytest.raises(outrider.ModelError, match="no model directory at /nowhere"):
            decoder.setup("/nowhere")
        with pytest.raises(outrider.LinkError, match=r"127\.0\.0\.1:9"):
            decoder.setup("grpc://127.0.0.1:9")
        with pytest.raises(outrider.ConfigError, match="device"):
            decoder.setup("grpc://127.0.0.1:9", device="cpu")
    assert eventually(lambda: threading.active_count() <= threads)


def test_a_cached_hub_id_is_a_directory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def find(repo_id: str, *, local_files_only: bool) -> str:
        asked.append((repo_id, local_files_only))
        return str(tiny)

    monkeypatch.setattr("huggingface_hub.snapshot_download", find)
    with SpeculativeDecoder() as decoder:
        decoder.setup("org/model", SpeculativeConfig("ngram"), device="cpu")
        assert len(decoder.decode_step(PROMPT, 3, seed=1)[0]) == 3
    assert asked == [("org/model", True)]


def test_threads_share_the_steps_of_one_engine(embedded: SpeculativeDecoder) -> None:
    """The link is safe for several sessions at once, whoever of them runs a step."""
    connection = embedded._running.connection  # type: ignore[union-attr]
    texts: dict[int, list[tuple[int, ...]]] = {1: [], 2: []}

    def work(seed: int) -> None:
        prepared = connection.prepare(
            PROMPT, {"max_new_tokens": 24, "seed": seed, "num_speculative_tokens": 3}
        )
        connection.start(prepared, _InCaller)
        texts[seed].append(prepared.session.result.token_ids)

    for seed in texts:
        work(seed)
    threads = [threading.Thread(target=work, args=(1 + number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [len(each) for each in texts.values()] == [3, 3]
    assert all(len(set(each)) == 1 for each in texts.values())
    engine = embedded._running.verifier.engine  # type: ignore[union-attr]
    engine.check_integrity()
    assert engine.num_sessions == 0


def test_the_kv_pool_and_the_prefix_cache_are_the_engines(embedded: SpeculativeDecoder) -> None:
    prompt = list(range(100, 140))
    assert embedded.prefix_cache.match(prompt) == []
    embedded.decode_step(prompt, 4, seed=1)
    assert len(embedded.prefix_cache.match(prompt)) == 2  # whole blocks of 16
    assert embedded.kv_pool.num_free == embedded.kv_pool.manager.num_blocks
