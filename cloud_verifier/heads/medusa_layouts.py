"""Reads Medusa's and Hydra's heads.

    Medusa's own, and ours      config.json: {"medusa_num_heads", "medusa_num_layers", "outrider": {"kind", …}}
    Medusa's in vLLM's layout   config.json: {"num_heads", "num_hidden_layers", …}

The tensors of the first are `{k}.{block}.linear.weight|bias` and, where a head has an output embedding of its own,
`{k}.{num_blocks}.weight`; of Hydra's there is `{k}.inputs.weight|bias` too (`training/heads/directory.py`). Those of
the second are `blocks.{k}.layers.{block}.weight|bias`, `lm_heads.{k}.weight`, or one `lm_head.weight` for all, and
`token_map`, the ids that are scored, where it is not the whole vocabulary; rows of other ids may be there, and with one
output embedding for all also those that are of no use, as vLLM reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.heads.directory import HeadDirectory
from outrider.cloud_verifier.heads.hydra import HydraRun
from outrider.cloud_verifier.heads.medusa import MedusaRun
from outrider.cloud_verifier.heads.modules import DraftVocabulary, HydraHead, MedusaHead
from outrider.cloud_verifier.heads.sequence import Head, HeadFacts, HeadRun, hidden_size

_KINDS: dict[str, type[HeadRun]] = {"medusa": MedusaRun, "hydra": HydraRun}


def read_medusa(directory: HeadDirectory, backend: PagedBackend) -> Head:
    """Returns Medusa's or Hydra's heads in Medusa's own layout."""
    kind = directory.config.get("outrider", {}).get("kind", "medusa")
    if kind not in _KINDS:
        raise directory.error(f"config.json: kind is {kind!r}; want one of {', '.join(_KINDS)}")
    num_heads, num_blocks = directory.count("medusa_num_heads"), directory.count("medusa_num_layers")
    size = hidden_size(backend)
    if (num_there := directory.num_numbered()) > num_heads:  # Medusa's own of Vicuna say 2 and are 5
        raise directory.error(
            f"config.json: medusa_num_heads is {num_heads}, and the file has {num_there} heads: correct config.json"
        )
    heads = nn.ModuleList(
        MedusaHead(size, num_blocks) if kind == "medusa" else HydraHead(size, number + 1, num_blocks)
        for number in range(num_heads)
    )
    directory.fill(heads, published_name)
    for number, head in enumerate(heads):
        if isinstance(head, MedusaHead) and (own := f"{number}.{num_blocks}.weight") in directory:
            head.output = _linear(directory.read(own, (backend.vocab_size, size)))
    return _make(directory, backend, kind, heads)


def published_name(name: str) -> str:
    """Returns Medusa's own name of a parameter of a list of heads: "0.blocks.1.linear.weight" → "0.1.linear.weight"."""
    return name.replace(".blocks.", ".")


def read_vllm_medusa(directory: HeadDirectory, backend: PagedBackend) -> Head:
    """Returns Medusa's heads in vLLM's layout."""
    num_heads, num_blocks = directory.count("num_heads"), directory.count("num_hidden_layers")
    size, config = hidden_size(backend), directory.config
    if config.get("logit_scale", 1) != 1:
        raise directory.error("config.json: logit_scale other than 1 is not served")
    outputs = _vllm_outputs(directory, backend, num_heads)
    heads = nn.ModuleList()
    for number in range(num_heads):
        head = MedusaHead(size, num_blocks)
        for block in range(num_blocks):
            linear, name = head.blocks[block].get_submodule("linear"), f"blocks.{number}.layers.{block}"
            linear.weight.data = directory.read(f"{name}.weight", (size, size))
            if config.get("medusa_fc_bias"):  # else it has none: zeros, as it was made
                linear.bias.data = directory.read(f"{name}.bias", (size,))
        head.output = outputs[number]
        heads.append(head)
    return _make(directory, backend, "medusa", heads)


def _vllm_outputs(directory: HeadDirectory, backend: PagedBackend, num_heads: int) -> list[nn.Module]:
    vocab_size, config = backend.vocab_size, directory.config
    num_scored = config.get("truncated_vocab_size") or vocab_size
    if type(num_scored) is not int or not 1 <= num_scored <= vocab_size:
        raise directory.error(
            f"config.json: truncated_vocab_size is {num_scored!r}; want a number up to {vocab_size}"
        )
    token_ids = None
    if num_scored < vocab_size:
        token_ids = check_token_ids(
            directory, "token_map", directory.read_ids("token_map", (num_scored,)), vocab_size
        )
    directory.leave("token_map")

    def read(name: str) -> nn.Module:
        size = hidden_size(backend)
        if token_ids is None:
            return _linear(directory.read(name, (vocab_size, size)))
        if directory.num_rows(name) == vocab_size:
            weight = directory.read(name, (vocab_size, size))[token_ids]
        else:
            weight = directory.read(name, (num_scored, size))
        return draft_vocabulary(weight, token_ids, vocab_size)

    if config.get("original_lm_head"):
        output = read("lm_head.weight" if "lm_head.weight" in directory else "lm_heads.0.weight")
        directory.leave(*(f"lm_heads.{number}.weight" for number in range(num_heads)))
        return [output] * num_heads
    return [read(f"lm_heads.{number}.weight") for number in range(num_heads)]


def check_token_ids(directory: HeadDirectory, name: str, token_ids: Tensor, vocab_size: int) -> Tensor:
    """Returns the ids that a draft scores. Raises `ModelError` where one is twice or not of the target."""
    if token_ids.min() < 0 or token_ids.max() >= vocab_size or len(set(token_ids.tolist())) < len(token_ids):
        raise directory.error(f"{name} does not give each row another id below {vocab_size}")
    return token_ids


def draft_vocabulary(weight: Tensor, token_ids: Tensor, vocab_size: int) -> DraftVocabulary:
    """Returns the output embedding `weight` [n, size] of some ids [n]."""
    output = DraftVocabulary(weight.shape[1], token_ids, vocab_size)
    output.linear.weight.data = weight
    return output


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _make(directory: HeadDirectory, backend: PagedBackend, kind: str, heads: nn.ModuleList) -> Head:
    directory.check_all_read()
    heads.to(backend.device, getattr(torch, backend.dtype)).requires_grad_(False)
    facts = HeadFacts(
        name=kind,
        max_depth=len(heads),
        feature_layers=(backend.facts.num_layers,),
        reads_all=False,
        fingerprint=directory.fingerprint,
    )
    return Head(backend, facts, heads, _KINDS[kind])
