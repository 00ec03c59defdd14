"""Characters that a tokenizer has no token for are lost to both models: said once, for every kind of model."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.processes.pairs import EMBEDDED
from tokenizers import Tokenizer, models, pre_tokenizers

from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer

_BPE = {"d": 0, "e": 1, "f": 2, "de": 3, " ": 4, "<unk>": 5}
_MODELS = {
    "bpe": models.BPE(_BPE, [("d", "e")], unk_token="<unk>"),
    "bpe that leaves out": models.BPE(_BPE, [("d", "e")]),
    "words": models.WordLevel({"def": 0, "<unk>": 1}, unk_token="<unk>"),
    "word pieces": models.WordPiece({"def": 0, "[UNK]": 1}, unk_token="[UNK]"),
    "unigram": models.Unigram(
        [("d", -1.0), ("e", -1.0), ("f", -1.0), (" ", -1.0), ("<unk>", -9.0)], unk_id=4
    ),
}


@pytest.mark.parametrize("kind", _MODELS)
def test_it_warns_once_and_not_of_a_text_that_it_has_tokens_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    made = Tokenizer(_MODELS[kind])
    if "word" in kind:
        made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = EdgeTokenizer(tmp_path / "tokenizer.json")
    with caplog.at_level(logging.WARNING, "outrider"):
        tokenizer.encode("def def")
        assert not caplog.messages
        for _ in range(2):
            tokenizer.encode("def é")
    assert len(caplog.messages) == 1 and "no token for" in caplog.messages[0]
    assert str(tmp_path / "tokenizer.json") in caplog.messages[0] and "é" not in caplog.messages[0]


def test_a_byte_level_tokenizer_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    with caplog.at_level(logging.WARNING, "outrider"):
        tokenizer.encode("".join(map(chr, (*range(0, 0x800), *range(0x4E00, 0x4E40), 0x1F600, 0x10FFFF))))
    assert not caplog.messages
