"""What a tokenizer.json asks for that a prompt must not have."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.models import EMBEDDED


def test_a_prompt_is_neither_cut_nor_filled_up(tmp_path: Path) -> None:
    path = EMBEDDED / "draft" / "tokenizer.json"
    text = "def read_lines(path):"
    wanted = EdgeTokenizer(path).encode(text)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "cut.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "filled.json"))
    for name in ("cut.json", "filled.json"):
        assert EdgeTokenizer(tmp_path / name).encode(text) == wanted, name
