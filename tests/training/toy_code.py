"""A language of 64 whole lines, of which some make functions that parse."""

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

LINES = [
    "<|endoftext|>",
    "def f(x):\n",
    '    """What f does."""\n',
    *(f"y{number} = 1\n" for number in range(9)),
    *(f"    x = {number}\n" for number in range(40)),
    *(f"    x = ({number}\n" for number in range(12)),
]


def toy_tokenizer() -> Tokenizer:
    """A line is a token, its place in `LINES` its id."""
    tokenizer = Tokenizer(WordLevel({line: index for index, line in enumerate(LINES)}, LINES[0]))
    tokenizer.pre_tokenizer = Split(Regex(r"[^\n]*\n"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(LINES[:1])
    return tokenizer


def toy_functions(count: int) -> npt.NDArray[np.uint16]:
    """Functions of four lines, the separator in front of each."""
    bodies = np.random.default_rng(0).integers(12, 52, (count, 4))
    heads = np.broadcast_to([0, 1, 2], (count, 3))
    return np.concatenate([heads, bodies], axis=1).astype(np.uint16).ravel()
