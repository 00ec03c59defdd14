"""Byte-level BPE over Python source, for both models of the pair.

The pre-tokeniser keeps a run of newlines, and a run of two or more spaces, as one piece each. They are two
pieces and not one, so that a prompt that ends in a newline is cut as the same text was cut in training, and
the model goes on with an indentation. A single leading space, dot or underscore belongs to the word after
it, as in GPT-4's pattern.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
PATTERN = (
    r" ?__[a-z]+__"  # dunder names
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # a word with the one character before it
    r"|\p{N}{1,3}"
    r"| {2,}"  # indentation
    r"|[\r\n]+"
    r"| ?[^\s\p{L}\p{N}]+"  # punctuation
    r"|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 8192) -> Tokenizer:
    """Train a tokenizer of exactly `vocab_size` ids (where the text is rich enough); id 0 is
    `<|endoftext|>`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# Roles are comments of Python, the text that these models are trained on: no token stands for one.
CHAT_TEMPLATE = r"""{% for message in messages %}# {{ message['role'] }}
{{ message['content'] }}

{% endfor %}# assistant{{ "\n" }}"""


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int = 4096) -> None:
    """Write tokenizer.json, tokenizer_config.json and a plain chat template, as `transformers.AutoTokenizer` loads
    them."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(str(directory))


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read tokenizer.json. Raises FileNotFoundError naming the path when it is not there."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no tokenizer at {path}: run `python -m outrider.training.pair` first, or name another directory"
        )
    return Tokenizer.from_file(str(path))
