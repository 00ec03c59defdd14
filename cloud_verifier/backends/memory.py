"""How much memory of a device the KV pool takes: what is free beside the weights and a step, or what the user says."""

from __future__ import annotations

import logging

import torch

from outrider.cloud_verifier.backends.decoder import Decoder
from outrider.cloud_verifier.backends.facts import TargetFacts
from outrider.common.config.units import show_size
from outrider.common.errors import ModelError
from outrider.common.models import memory as models

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 512 * 2**20


def device_memory(device: str) -> tuple[int, int]:
    """Returns the free and the total bytes of a CUDA device."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def check_weights_fit(num_bytes: int, model_id: str, dtype: str, device: str) -> None:
    """Raises `ModelError` where a CUDA device has less free memory than a target's weights take."""
    if device == "cpu":
        return
    free, total = device_memory(device)
    if num_bytes > free:
        raise ModelError(
            f"the weights of {model_id} take {show_size(num_bytes)} in {dtype}; {device} has {show_size(free)} free "
            f"of {show_size(total)}: name another --device, or a smaller --target"
        )


def kv_pool_bytes(
    facts: TargetFacts, decoder: Decoder, asked: int | None, step_tokens: int, heads_bytes: int = 0
) -> int:
    """Returns the size of the pool, after the weights were loaded: `asked` bytes, else 512 MiB on a CPU and what a
    CUDA device has free beside a step of `step_tokens` and `heads_bytes`, which are loaded later.

    Raises `ModelError` where the device does not have what is asked for.
    """
    if facts.device == "cpu":
        return CPU_KV_BYTES if asked is None else asked
    free, total = device_memory(facts.device)
    step = step_bytes(facts, _largest_matrix(decoder), step_tokens) + int(models.KEPT_SHARE * total)
    room = max(0, free - step - heads_bytes)
    has = f"{facts.device} has {show_size(free)} free beside the weights of {facts.model_id}"
    takes = f"a step of {step_tokens} tokens (--max-step-tokens) takes about {show_size(step)}"
    if heads_bytes:
        takes += f", and --heads with --draft-kv-memory {show_size(heads_bytes)}"
    if asked is None:
        if not room:
            raise ModelError(
                f"no memory is left for KV: {has}, and {takes}; name another --device, or lower it"
            )
        return room
    if asked > free:
        raise ModelError(f"--kv-memory {show_size(asked)}: {has}; auto would take {show_size(room)}")
    if asked > room:
        logger.warning("--kv-memory %s may be too much: %s, and %s", show_size(asked), has, takes)
    return asked


def step_bytes(facts: TargetFacts, largest_matrix: int, step_tokens: int) -> int:
    """Returns about how many bytes a step takes at most beside weights and KV, or the check of exact rows at the
    start: two copies of a matrix of `largest_matrix` numbers."""
    itemsize = int(getattr(torch, facts.dtype).itemsize)
    step = models.step_bytes(facts.num_heads, facts.head_dim, facts.vocab_size, itemsize, step_tokens)
    return max(step, 2 * largest_matrix * itemsize)


def _largest_matrix(decoder: Decoder) -> int:
    try:
        return max((kind.num_inputs * kind.num_outputs for kind in decoder.matrix_kinds()), default=0)
    except ModelError:  # of a model whose rows cannot be exact: nothing is checked
        return 0
