"""Reads EAGLE's drafts as they are published.

    EAGLE, EAGLE-2 (its authors)   fc.*, layers.0.*
    EAGLE-3 (SpecForge)            fc.*, midlayer.*, norm.*, lm_head.*, d2t, t2d; config.json of the layer, with
                                   draft_vocab_size and eagle_config
    EAGLE-3 (speculators)          fc.*, layers.0.*, norm.*, lm_head.*, d2t, t2d; the layer's configuration under
                                   transformer_layer_config, with draft_vocab_size and options beside it

`embed_tokens.weight` may be absent: then the target's is used. `d2t[i] + i` is the target's id of the draft's id i.
`eagle_aux_hidden_state_layer_ids` may name the layers whose states EAGLE-3 reads: under `eagle_config`, as SGLang reads
it, those after which a state is taken; at the top, as vLLM reads it, those before which. Ours (`training/heads`) have
SpecForge's layout without an output embedding; under `outrider` is `feature_layers`, counted as SGLang does, the number
of layers after the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outrider.cloud_verifier.backends.decoder_config import (
    DEFAULT_HEAD_DIM,
    DecoderConfig,
    make_decoder_config,
    with_defaults,
)
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.heads.directory import HeadDirectory
from outrider.cloud_verifier.heads.eagle import MAX_DEPTH, EagleHead
from outrider.cloud_verifier.heads.eagle_modules import Eagle, Eagle3, EagleDraft
from outrider.cloud_verifier.heads.medusa_layouts import check_token_ids, draft_vocabulary
from outrider.cloud_verifier.heads.sequence import HeadFacts, hidden_size

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

# What `speculators` leaves out of config.json: what transformers assumes for a type (its `to_diff_dict`).
_ASSUMED: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
}
# Gemma 2's layer has its norms in other places.
_LAYER_TYPES = tuple(each for each in DEFAULT_HEAD_DIM if each != "gemma2")
_COMPARED_ROWS = 4096  # of embeddings, at a time


def read_eagle(directory: HeadDirectory, backend: PagedBackend) -> EagleHead:
    """Returns a draft of EAGLE or EAGLE-2."""
    config = _layer_config(directory, directory.config, backend)
    if config.hidden_size != hidden_size(backend):
        raise directory.error(
            f"config.json: hidden_size is {config.hidden_size}; the target's is {hidden_size(backend)}"
        )
    draft = Eagle(config, has_bias="fc.bias" in directory)
    directory.fill(draft, published_names("layers.0"))
    return _make(directory, backend, draft, (backend.facts.num_layers,))


def read_specforge(directory: HeadDirectory, backend: PagedBackend) -> EagleHead:
    """Returns an EAGLE-3 draft as SpecForge writes it."""
    return _read_eagle3(directory, backend, directory.config, "midlayer", _eagle31(directory))


def read_speculators(directory: HeadDirectory, backend: PagedBackend) -> EagleHead:
    """Returns an EAGLE-3 draft as `speculators` writes it."""
    config = directory.config
    if config["speculators_model_type"] != "eagle3":
        raise directory.error(
            f"config.json: speculators_model_type is {config['speculators_model_type']!r}; eagle3 is served"
        )
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise directory.error("config.json has no transformer_layer_config")
    if not isinstance(
        config.get("norm_before_residual"), bool
    ):  # readers of this layout differ in the default
        raise directory.error("config.json: norm_before_residual is not given; want true or false")
    layer = {**_ASSUMED.get(layer.get("model_type", "llama"), {}), **layer}
    options = {
        "has_feature_norm": bool(config.get("norm_before_fc")),
        "is_norm_before_residual": config["norm_before_residual"],
    }
    return _read_eagle3(directory, backend, layer, "layers.0", options | _eagle31(directory))


def _eagle31(directory: HeadDirectory) -> dict[str, bool]:
    """Returns the option of EAGLE-3.1 that is served. Raises `ModelError` for the other one."""
    if directory.config.get("fc_norm"):
        raise directory.error(
            "config.json: fc_norm is true; features that are each normalised are not served"
        )
    return {"is_output_normed": bool(directory.config.get("norm_output"))}


def published_names(layer: str) -> Callable[[str], str]:
    """Returns what maps a parameter's name in `eagle_modules` to the published one; `layer` is the layer's."""
    names = {
        "token_norm": f"{layer}.input_layernorm",
        "state_norm": f"{layer}.hidden_norm",
        "feature_norm": "input_norm",
        "layer.mlp_norm": f"{layer}.post_attention_layernorm",
        "output.linear": "lm_head",
        "output": "lm_head",
        "embedding": "embed_tokens",
    }

    def name_of(name: str) -> str:
        module, _, end = name.rpartition(".")
        if module in names:
            return f"{names[module]}.{end}"
        _, is_of_layer, part = module.partition("layer.")
        if not is_of_layer:
            return name
        block = "mlp" if part in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        return f"{layer}.{block}.{part}.{end}"

    return name_of


def _read_eagle3(
    directory: HeadDirectory,
    backend: PagedBackend,
    layer: Mapping[str, Any],
    layer_name: str,
    options: dict[str, bool],
) -> EagleHead:
    config = _layer_config(directory, layer, backend)
    target_size = directory.config.get("target_hidden_size") or hidden_size(backend)
    if target_size != hidden_size(backend):
        raise directory.error(
            f"config.json: target_hidden_size is {target_size}; the target's is {hidden_size(backend)}"
        )
    layers = _feature_layers(directory, backend.facts.num_layers)
    draft = Eagle3(config, len(layers) * target_size, **options)
    directory.fill(draft, published_names(layer_name))
    if not directory.config.get("outrider", {}).get("shares_output_embedding"):
        draft.output = _output(directory, config.hidden_size, backend.vocab_size)
    return _make(directory, backend, draft, layers)


def _layer_config(directory: HeadDirectory, raw: Mapping[str, Any], backend: PagedBackend) -> DecoderConfig:
    """Returns the configuration of the one layer. Raises `ModelError` naming the field that is in the way."""
    fields = with_defaults({"model_type": "llama", "sliding_window": None, **raw})
    if fields is None or fields["model_type"] not in _LAYER_TYPES:
        kinds = ", ".join(_LAYER_TYPES)
        raise directory.error(f"config.json: model_type is {raw.get('model_type')!r}; want one of {kinds}")
    try:
        config = make_decoder_config(fields)
    except (ValueError, TypeError) as error:
        raise directory.error(f"config.json: {error}") from error
    if config is None:
        raise directory.error(
            "config.json lacks a size of the layer, or has an activation or rotary embedding "
            "that is not computed here"
        )
    wrong = next(
        (
            f"{name} is {found}; want {wanted}"
            for name, found, wanted in (
                ("num_hidden_layers", config.num_hidden_layers, 1),
                ("vocab_size", config.vocab_size, backend.vocab_size),
                ("the attention's window", config.windows[0], None),
                ("hidden_act", config.activation, "silu"),
            )
            if found != wanted
        ),
        None,
    )
    if wrong:
        raise directory.error(f"config.json: {wrong}")
    return config


def _feature_layers(directory: HeadDirectory, num_layers: int) -> tuple[int, ...]:
    """Returns the layers after which the states are taken."""
    ours = directory.config.get("outrider", {}).get("feature_layers")
    if ours is not None:
        return _check_layers(directory, "feature_layers", ours, (*range(num_layers - 1), num_layers))
    eagle = directory.config.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise directory.error("config.json: use_aux_hidden_state is false; a draft on three layers is served")
    after, before = eagle.get(LAYER_IDS), directory.config.get(LAYER_IDS)
    ids = after or before
    if not ids:
        return usual_layers(num_layers)
    first = 0 if after else 1
    layers = _check_layers(directory, LAYER_IDS, ids, range(first, first + num_layers - 1))
    return tuple(layer - first for layer in layers)


def _check_layers(directory: HeadDirectory, name: str, ids: Any, known: Collection[int]) -> tuple[int, ...]:
    """`known` are the target's; the last one's states before the final norm are not kept."""
    if not isinstance(ids, list) or not ids or not all(type(each) is int for each in ids):
        raise directory.error(f"config.json: {name} is {ids!r}; want a list of numbers")
    if not set(ids) <= set(known):
        raise directory.error(
            f"config.json: {name} {ids} are not of the target; want some of {', '.join(map(str, known))}"
        )
    return tuple(ids)


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Returns the layers after which EAGLE-3 takes states where its directory does not say: the second, the one in the
    middle and the fourth from the end; in a small target as near to them as there are."""
    last = max(0, num_layers - 2)
    low = min(1, last)
    middle = min(max(low, num_layers // 2 - 1), last)
    return low, middle, max(middle, num_layers - 4)


def _output(directory: HeadDirectory, size: int, vocab_size: int) -> nn.Module:
    num_scored = vocab_size
    if directory.config.get("draft_vocab_size") is not None:
        num_scored = directory.count("draft_vocab_size", vocab_size)
    weight = directory.read("lm_head.weight", (num_scored, size))
    token_ids = torch.arange(num_scored)
    if "d2t" in directory or num_scored < vocab_size:
        offsets = directory.read_ids("d2t", (num_scored,))
        if num_scored < vocab_size:
            token_ids = check_token_ids(directory, "d2t", token_ids + offsets, vocab_size)
    if "t2d" in directory:
        is_scored = directory.read_ids("t2d", (vocab_size,))
        if num_scored < vocab_size and is_scored.nonzero()[:, 0].tolist() != token_ids.sort().values.tolist():
            raise directory.error("t2d and d2t do not name the same ids")
    return draft_vocabulary(weight, token_ids, vocab_size)


def _make(
    directory: HeadDirectory, backend: PagedBackend, draft: EagleDraft, layers: tuple[int, ...]
) -> EagleHead:
    size, target_size = draft.layer.o_proj.out_features, hidden_size(backend)
    if "embed_tokens.weight" in directory:
        table = directory.read("embed_tokens.weight", (backend.vocab_size, size))
        if not _is_targets(table, backend):
            draft.embedding = nn.Embedding(table.shape[0], table.shape[1], _weight=table)
    elif size != target_size:
        raise directory.error(
            f"the tensor embed_tokens.weight is missing, and the target's has {target_size} columns, not {size}"
        )
    directory.check_all_read()
    draft.to(backend.device, getattr(torch, backend.dtype)).requires_grad_(False)
    facts = HeadFacts(
        name="eagle",
        max_depth=MAX_DEPTH,
        feature_layers=layers,
        reads_all=True,
        fingerprint=directory.fingerprint,
    )
    return EagleHead(backend, facts, draft)


def _is_targets(table: Tensor, backend: PagedBackend) -> bool:
    """Returns whether a table [vocab_size, size] is the target's input embedding, in the target's dtype."""
    if table.shape[1] != hidden_size(backend):
        return False
    for start in range(0, len(table), _COMPARED_ROWS):
        rows = table[start : start + _COMPARED_ROWS]
        ids = torch.arange(start, start + len(rows), device=backend.device)
        of_target = backend.decoder.embed(ids)
        if not torch.equal(of_target, rows.to(of_target.device, of_target.dtype)):
            return False
    return True
