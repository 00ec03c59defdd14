"""Sessions whose draft knows something only now and then: prompt lookup, and the command that asks for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.edge.edge_fakes import PROMPT, FakeVerifier, Silent, make_session
from support.edge.tiny_draft import make_backend, make_tiny_draft
from support.processes.server import serving

from outrider.common.types import FinishReason, GenerateRequest, Origin, VerifyRequest
from outrider.edge_client.commands.cli import main
from outrider.edge_client.core.options import OnTimeout
from outrider.edge_client.drafting.copying.prompt_lookup import PromptLookupModel

# The prompt comes back in the text, then something new, then the new part again.
TEXT = (*PROMPT, 10, 11, 12, 13, *PROMPT, 10, 11, 12, 13, 20, 21, 22, 20, 21, 22, *range(30, 60))
LOOKUP = PromptLookupModel(100, "tokenizer-1")


def test_rounds_without_a_draft_are_answered_one_token_each_and_drafting_resumes() -> None:
    verifier = FakeVerifier(target=TEXT)
    session = make_session(verifier, LOOKUP, depth=3, max_new_tokens=24)
    list(session.generate())
    assert session.result.token_ids == TEXT[2:26]
    assert session.result.finish_reason is FinishReason.LENGTH
    assert not verifier.of(GenerateRequest), "an empty draft is no reason to leave speculation"
    drafts = [request.draft_tokens for request in verifier.of(VerifyRequest)]
    assert drafts[0] == () and (91, 10, 11) in drafts
    assert session.result.origins.count(Origin.ACCEPTED) >= 6
    stats = session.result.stats
    assert sum(not r.num_draft_tokens for r in stats.rounds) >= 4
    assert stats.summary(session.result.origins)["num_rounds"] == len(drafts)


@pytest.mark.parametrize("on_timeout", [OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY])
def test_a_timeout_of_a_round_without_a_draft_is_waited_for(on_timeout: OnTimeout) -> None:
    verifier = FakeVerifier(target=TEXT, script={("verify", 1): Silent()})
    session = make_session(verifier, LOOKUP, depth=3, on_timeout=on_timeout, max_new_tokens=12)
    list(session.generate())
    assert session.result.token_ids == TEXT[2:14]
    assert session.result.stats.num_timeouts == 1 and session.result.num_unverified_tokens == 0


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("lookup"))


def test_the_command_drafts_with_a_tokenizer_alone_and_writes_the_targets_text(
    draft_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((draft_dir / "tokenizer.json").read_bytes())
    texts = []
    with serving(make_backend(draft_dir)) as server:
        for flags in (["--draft-strategy", "prompt-lookup", "--lookup-ngram", "2"], ["--mode", "cloud-only"]):
            flags += ["--verifier", f"127.0.0.1:{server.port}", "--draft", str(tmp_path), "--seed", "7"]
            prompt = "def f(x): return x\ndef f("
            assert main(["run", prompt, *flags, "--max-new-tokens", "30", "--ignore-eos", "--json"]) == 0
            texts.append(json.loads(capsys.readouterr().out))
    assert texts[0]["token_ids"] == texts[1]["token_ids"] and len(texts[0]["token_ids"]) == 30
    assert texts[0]["draft_fingerprint"] and texts[0]["num_unverified_tokens"] == 0


def test_prompt_lookup_cannot_write_alone(draft_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--draft-strategy", "prompt-lookup", "--mode", "edge-only", "--draft", str(draft_dir)]
    assert main(["run", "abc", *flags]) == 2
    assert "--mode edge-only needs a model" in capsys.readouterr().err


def test_an_unknown_strategy_is_refused_with_the_known_ones(
    draft_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "abc", "--draft-strategy", "telepathy", "--draft", str(draft_dir)]) == 2
    shown = capsys.readouterr().err
    assert "telepathy" in shown and "model" in shown and "prompt-lookup" in shown
