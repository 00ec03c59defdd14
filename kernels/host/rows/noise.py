"""The noise of a key: Philox words, their 32-bit lanes and the Gumbel numbers made of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from outrider.kernels.host.compiler import jit

LANES = 8  # ids a Philox block is for
WORDS = 4
FIRST_BLOCK = np.zeros(1, np.int64)  # draws a single block, with its number as first_block

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_NUM_ROUNDS = 10


def _make_multiply(typing_context: Any, a: Any, b: Any) -> Any:
    """Returns (high, low) of the 128-bit product of two uint64: one instruction on x86 and ARM."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, word = ir.IntType(128), ir.IntType(64)
        left, right = (builder.zext(each, wide) for each in arguments)
        product = builder.mul(left, right)
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), word)
        return context.make_tuple(builder, signature.return_type, (high, builder.trunc(product, word)))

    return types.UniTuple(types.uint64, 2)(types.uint64, types.uint64), generate


_multiply: Any = intrinsic(_make_multiply)


@jit()
def draw_blocks(key: Any, first_block: Any, blocks: Any, words: Any) -> None:
    """Fills `words` with four words of numpy's Philox 4x64-10 for each block first_block + blocks[i].

    `key` is uint64 [seed, purpose, position, index]. Salmon et al. 2011.
    """
    seed, purpose, position, index = key[0], key[1], key[2], key[3]
    for i in range(blocks.size):
        key_0, key_1 = seed, purpose
        # numpy raises its counter before it draws. A block's number is far from 2^64, so there is no carry.
        c0, c1, c2, c3 = np.uint64(first_block + blocks[i]) + np.uint64(1), position, index, np.uint64(0)
        for _ in range(_NUM_ROUNDS):
            high_0, low_0 = _multiply(_MULTIPLIER_0, c0)
            high_1, low_1 = _multiply(_MULTIPLIER_1, c2)
            c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
            key_0 += _WEYL_0
            key_1 += _WEYL_1
        words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = c0, c1, c2, c3


@jit()
def lane_at(words: Any, index: Any) -> Any:
    """Returns the 32-bit lane `index` of some words, low half of a word first."""
    return np.uint32(words[index >> 1] >> np.uint64(32 * (index & 1)))


@jit()
def gumbel(lane: Any) -> Any:
    """Returns the Gumbel number of a lane in float64."""
    return -math.log(-math.log1p((np.float64(lane) + 0.5) * -(2.0**-32)))
