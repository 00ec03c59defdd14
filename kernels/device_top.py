"""The ids that score highest with the noise of a position, of all rows of a draft at once, for CUDA in Triton.

It is `outrider.common.noise.draws.coupled_top` on the device: sums are rounded to float32, which is near enough for a
draft. The noise itself is that of `outrider.kernels.device`, id for id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.device import _BLOCK, _all_lanes, _gumbel

TILE_BLOCKS = 64  # Philox blocks of eight ids a program
NUM_WARPS = 2  # a thread for each block, whose words it alone computes


@triton.jit  # type: ignore[untyped-decorator]
def _score(  # type: ignore[no-untyped-def]
    logits, row_stride, num_tokens, temperatures, keys, scores, NUM_BLOCKS: tl.constexpr
):
    """Runs program (row, tile): logit / temperature + noise, the logit itself at temperature 0."""
    row, tile = tl.program_id(0), tl.program_id(1)
    blocks = tile * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    ids = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    is_id = ids < num_tokens
    found = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=is_id, other=-float("inf"))
    found = found.to(tl.float32)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        noise = _gumbel(_all_lanes(keys + row * 4, blocks, NUM_BLOCKS))
        found = (tl.div_rn(found, tl.broadcast_to(temperature, found.shape)).to(tl.float64) + noise).to(
            tl.float32
        )
    tl.store(scores + row.to(tl.int64) * num_tokens + ids, found, mask=is_id)


def coupled_tops(
    logits: torch.Tensor, num_tokens: int, temperatures: torch.Tensor, keys: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `count` largest sums of score and noise of each row and their ids, float32 and int64 [rows, count],
    the largest first; at temperature 0 the largest logits. A row with NaN begins with it.

    `logits` is [rows, vocab], last dimension contiguous, of which the first `num_tokens` ids exist; `temperatures`
    float32 [rows]; `keys` int64 [rows, 4], as `outrider.kernels.device.gumbel_argmax` takes them.
    """
    scores = torch.empty((len(logits), num_tokens), dtype=torch.float32, device=logits.device)
    grid = len(logits), triton.cdiv(num_tokens, TILE_BLOCKS * _BLOCK.value)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _score[grid](
            logits, logits.stride(0), num_tokens, temperatures, keys, scores, NUM_BLOCKS=TILE_BLOCKS,
            enable_fp_fusion=False, num_warps=NUM_WARPS,
        )  # fmt: skip
    largest, ids = scores.topk(min(count, num_tokens), dim=1)
    return largest, ids
