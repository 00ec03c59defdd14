"""Text as it comes, token by token: nothing of the prompt in it, and no end of it where bytes are no text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from outrider.common.types import TokenLogprobs
from outrider.edge_client.daemon.openai.logprobs import ScoredToken, completion_logprobs
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.models import EMBEDDED

WORDS = ["<unk>", "abc", "▁x"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_id(byte: int) -> int:
    return len(WORDS) + byte


@pytest.fixture
def by_bytes(tmp_path: Path) -> EdgeTokenizer:
    """As Llama 2's, Mistral's and Gemma's: what has no token is spelt by tokens of single bytes."""
    vocabulary = {token: number for number, token in enumerate([*WORDS, *BYTES])}
    model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return EdgeTokenizer(tmp_path / "tokenizer.json")


def test_a_tokens_text_keeps_the_space_that_the_beginning_of_a_text_loses(tmp_path: Path) -> None:
    """As Llama 2's and Mistral's: of " the" and "the" each is itself, in log-probabilities too."""
    words = ["<unk>", "▁the", "the", "▁", "▁a", "a"]
    model = models.BPE({token: number for number, token in enumerate(words)}, [("▁", "a")], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = EdgeTokenizer(tmp_path / "tokenizer.json")
    assert ours.decode([1]) == ours.decode([2]) == "the"
    assert [ours.token_text(number) for number in range(1, 6)] == [" the", "the", " ", " a", "a"]
    known = TokenLogprobs(-0.1, -0.1, (1, 2), (-0.1, -3.0))
    scored = [ScoredToken(1, 4, known)]
    assert completion_logprobs(ours, scored, 2, 0)["top_logprobs"] == [{" the": -0.1, "the": -3.0}]


@pytest.mark.parametrize("prompt_ids", [[], [1, byte_id(0x0A)]])
def test_bytes_that_are_no_character_do_not_end_the_text(
    by_bytes: EdgeTokenizer, prompt_ids: list[int]
) -> None:
    decode = by_bytes.decoder(prompt_ids)
    ids = [1, byte_id(0x0A), byte_id(0xF0), 1, 2, byte_id(0x0A), byte_id(0xE2), byte_id(0x82), 2, 1]
    assert [decode(token_id) for token_id in ids] == [
        "abc",
        "\n",
        "",
        "\ufffdabc",
        " x",
        "\n",
        "",
        "",
        "\ufffd\ufffd x",
        "abc",
    ]


def test_after_a_prompt_that_ends_in_bytes_of_a_line_nothing_is_said_twice(by_bytes: EdgeTokenizer) -> None:
    decode = by_bytes.decoder([1, byte_id(0x0A)])
    assert [decode(each) for each in (byte_id(0xF0), 1, 2)] == ["", "\ufffdabc", " x"]


def embedded() -> EdgeTokenizer:
    return EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")


def test_a_prompt_that_ends_within_a_character_is_not_repeated() -> None:
    tokenizer = embedded()
    token_ids = tokenizer.encode("room 42 is 😀 nice")
    first = next(index for index, each in enumerate(token_ids) if "\ufffd" in tokenizer.decode([each]))
    for num_bytes in (1, 2, 3):
        decode = tokenizer.decoder(token_ids[: first + num_bytes])
        assert "".join(map(decode, token_ids[first + num_bytes :])) == "😀 nice"


@pytest.mark.parametrize("prompt", ["room 42 \ufffd", "\ufffd\ufffd", "\ufffd and \ufffd"])
def test_a_prompt_that_ends_with_a_replacement_character_is_not_repeated(prompt: str) -> None:
    tokenizer = embedded()
    decode = tokenizer.decoder(tokenizer.encode(prompt))
    assert "".join(map(decode, tokenizer.encode(" and then", is_complete=True))) == " and then"
