"""The tokenizer round-trips every string, and cuts prompts as it cut the training text."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from outrider.edge_client.tokenization.chat_template import load_chat_template
from outrider.models import EMBEDDED
from outrider.training.data.tokenizer import END_OF_TEXT, load_tokenizer, save_tokenizer, train_tokenizer

CODE = (
    'def area(width, height):\n    """Area of a rectangle."""\n    if width < 0:\n        raise ValueError\n'
    "    return width * height\n"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(
        [CODE * 3, "class A:\n    def __init__(self, x_y):\n        self.x_y = x_y\n" * 3], 400
    )


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60) | st.text(alphabet=" \t\r\n_.:a1é\u3000😀", max_size=60))
def test_every_string_round_trips_exactly(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_newlines_and_indentation_are_pieces_of_their_own(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("    if x:\n        raise ValueError\n").tokens
    assert tokens[0] == "Ġ" * 4
    assert "Ċ" in tokens and "Ġ" * 8 in tokens


def test_a_prompt_that_ends_in_a_newline_is_a_prefix_of_the_whole_texts_ids(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode(CODE).ids
    for end in [index + 1 for index, character in enumerate(CODE) if character == "\n"]:
        prompt = tokenizer.encode(CODE[:end]).ids
        assert whole[: len(prompt)] == prompt


def test_a_saved_tokenizer_loads_in_transformers_with_its_end_of_text(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert (loaded.eos_token, loaded.eos_token_id) == (END_OF_TEXT, 0)
    assert loaded(CODE)["input_ids"] == tokenizer.encode(CODE).ids
    assert loaded.decode(loaded(CODE)["input_ids"]) == CODE


def test_its_chat_template_is_the_embedded_pairs_and_renders_as_in_transformers(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x = 1\ny = 2"}]
    text = "# system\nbe brief\n\n# user\nx = 1\ny = 2\n\n# assistant\n"
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    for directory in (tmp_path, EMBEDDED / "draft", EMBEDDED / "target"):
        template = load_chat_template(directory)
        assert template is not None and template.render(messages) == text


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
