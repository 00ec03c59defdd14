"""Bad words are sent as the tokens that they have within a text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.session.factory import Edge
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer


def test_a_bad_word_has_no_begin_of_text_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "bad": 1, "fine": 2}, unk_token="<s>"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = run_config(mode="cloud-only", bad_word=["bad"])
    edge = Edge(config, EdgeTokenizer(tmp_path / "tokenizer.json"), None, 0.0, ())
    session = edge.session("fine", seed=1)
    assert edge.tokenizer.encode("fine") == [0, 2]
    assert session._state.options.sampling.bad_words == ((1,),)
