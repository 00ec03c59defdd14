"""Drafts with a model that a program has loaded already: a view of it shares its weights and has our attention.

The program's model stays as it is, and may be used meanwhile. Weights that change in place change the drafts too, which
change no text that the target decides.
"""

from __future__ import annotations

import copy
import hashlib
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from outrider.common.errors import ModelError
from outrider.edge_client.drafting.pytorch.architecture import check_decoder, max_context, num_tokens
from outrider.edge_client.drafting.pytorch.attention import ATTENTION_NAME, register_attention
from outrider.edge_client.drafting.pytorch.model import TorchDraftModel
from outrider.edge_client.drafting.pytorch.network import Network
from outrider.edge_client.drafting.pytorch.probe import check_attention

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FIRST_VALUES = 64  # of each tensor, in the fingerprint: all would take seconds


def draft_with(model: Any, tokenizer_json: Path) -> TorchDraftModel:
    """Returns a draft of a model of transformers, on its device and in its dtype.

    Raises `ModelError` for an architecture that the torch draft does not compute, a model in several places or without
    its weights, and a tokenizer with more tokens than it has embeddings.
    """
    name = f"model {type(model).__name__}"
    check_decoder(model.config, type(model), name)
    device, dtype = _place(model, name)
    count = num_tokens(model, tokenizer_json)
    weights = str(dtype).removeprefix("torch.")
    network = Network(_view(model, name), device, dtype, weights, count, max_context(model.config), False)
    try:
        check_attention(network)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    eos_token_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return TorchDraftModel(network, eos_token_ids, tokenizer_json, _fingerprint(model))


def _place(model: Any, name: str) -> tuple[torch.device, torch.dtype]:
    devices = {str(each.device) for each in model.parameters()}
    if len(devices) != 1 or "meta" in devices:
        raise ModelError(
            f"{name} is on {', '.join(sorted(devices))}: a draft's weights are on one device, so load it without "
            "offloading and without a device_map over several"
        )
    if model.dtype not in _DTYPES:
        raise ModelError(
            f"{name} computes in {model.dtype}: a draft computes in float32, bfloat16 or float16"
        )
    return model.device, model.dtype


def _view(model: Any, name: str) -> Any:
    """Returns modules and a configuration of their own around the tensors of `model`."""
    shared = {id(each): each for each in chain(model.parameters(), model.buffers())}
    try:
        view = copy.deepcopy(model, shared).eval()
    except (TypeError, RuntimeError, AttributeError) as error:  # of whatever was attached to the modules
        raise ModelError(f"{name} cannot be copied around its weights: {error}") from error
    register_attention()
    view.set_attn_implementation(ATTENTION_NAME)
    return view


def _fingerprint(model: Any) -> str:
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in model.state_dict().items():
        first = tensor.detach().flatten()[:_FIRST_VALUES].contiguous().view(torch.uint8).cpu()
        digest.update(f"{name}\0{tuple(tensor.shape)}\0".encode() + first.numpy().tobytes())
    return digest.hexdigest()
