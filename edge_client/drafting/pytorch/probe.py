"""Compares a loaded model with transformers' own attention: an architecture that attends otherwise is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from outrider.common.errors import ModelError
from outrider.edge_client.drafting.pytorch.attention import ATTENTION_NAME
from outrider.edge_client.drafting.pytorch.network import Network
from outrider.edge_client.drafting.pytorch.runner import TorchRunner

_NUM_TOKENS, _NUM_FIRST = 8, 5  # in two runs, so that states beside the KV would be missed
# Largest difference of a probability. In 16 bits two ways to attend round to other last digits.
_MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


def check_attention(network: Network) -> None:
    """Raises `ModelError` where rows of the KV buffer are not those of transformers' own attention."""
    token_ids = [(7 * number + 1) % network.num_tokens for number in range(_NUM_TOKENS)]
    runner = TorchRunner(replace(network, has_fp8_kv=False), 1.0)
    runner.feed(token_ids[:_NUM_FIRST], 0)
    found = runner.feed(token_ids[_NUM_FIRST:], _NUM_FIRST).probs
    if not np.isfinite(found).all():
        raise ModelError("its logits are not finite: the weights are damaged")
    difference = float(np.abs(found - _reference(network, token_ids)).max())
    if difference > _MAX_DIFFERENCE[network.dtype]:
        raise ModelError(
            f"this architecture keeps or attends to more than the torch draft computes: probabilities differ by "
            f"{difference:.2g} from transformers'"
        )


def _reference(network: Network, token_ids: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    model = network.model
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            inputs = torch.tensor([token_ids], device=network.device)
            logits = model(input_ids=inputs, use_cache=False, logits_to_keep=1).logits
        return logits[0, :, : network.num_tokens].float().softmax(-1).cpu().numpy()  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise ModelError(
            f"transformers cannot compute this configuration: {str(error).splitlines()[0]}"
        ) from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
