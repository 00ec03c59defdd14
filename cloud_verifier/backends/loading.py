"""Loads a local Hugging Face directory as a `TargetBackend`. Nothing is ever downloaded."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.cloud_verifier.backends.architectures import check_supported
from outrider.cloud_verifier.backends.exact_rows import use_exact_rows
from outrider.cloud_verifier.backends.lean import can_be_lean
from outrider.cloud_verifier.backends.model_files import check_model_files
from outrider.cloud_verifier.backends.probes import (
    find_varlen_page_size,
    probe,
    use_lean_if_right,
    use_varlen_if_right,
)
from outrider.cloud_verifier.backends.transformers_backend import (
    BLOCK_SIZE,
    TargetFacts,
    TransformersBackend,
    TransformersDecoder,
)
from outrider.cloud_verifier.verification.row_kernels import has_device_kernels
from outrider.common.errors import ModelError

DTYPES = ("float32", "bfloat16")
MIN_KV_TOKENS = 256
DEFAULT_KV_BYTES = 512 * 2**20


def load_target(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    kv_bytes: int = DEFAULT_KV_BYTES,
    kv_tokens: int | None = None,
    block_size: int = BLOCK_SIZE,
    num_threads: int = 0,
    is_lean: bool = True,
    exact_rows: str = "auto",
) -> TransformersBackend:
    """Loads a decoder from a local directory (config.json, tokenizer.json, *.safetensors).

    `device` is "cpu", "cuda" or "cuda:N"; `dtype` "float32", "bfloat16" or "auto" (float32 on a CPU, bfloat16
    on CUDA); `kv_bytes` the size of the KV pool for all sequences, or `kv_tokens` the same in tokens;
    `block_size` the tokens of a block, unless CUDA's paged attention needs another; `num_threads` torch's CPU
    threads (0 leaves torch's own choice; a setting of the whole process); `is_lean` whether the faster
    forward of `backends.lean` may be used; `exact_rows` "auto", "on" or "off" (see `exact_rows.use_exact_rows`).
    Raises `ModelError` for a directory that is incomplete, unsafe (pickled weights, remote code) or of an
    architecture that the packed forward does not compute, and where `exact_rows` is "on" and rows differ.
    """
    import torch

    directory = Path(path)
    config_json = check_model_files(directory)
    _check_device(device)
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    if num_threads:
        torch.set_num_threads(num_threads)
    with quiet_transformers():
        config = _load_config(directory, config_json)
        max_context = _max_context(config)
        check_supported(config, max_context)
        model = _load_model(directory, config, device, dtype)
    facts = _facts(directory, model, max_context, device, dtype)
    return make_backend(
        model,
        facts,
        kv_bytes=kv_bytes,
        kv_tokens=kv_tokens,
        block_size=block_size,
        is_lean=is_lean,
        exact_rows=exact_rows,
    )


def make_backend(
    model: Any,
    facts: TargetFacts,
    *,
    kv_bytes: int = DEFAULT_KV_BYTES,
    kv_tokens: int | None = None,
    block_size: int = BLOCK_SIZE,
    is_lean: bool = True,
    exact_rows: str = "auto",
) -> TransformersBackend:
    """Returns a loaded decoder, whose attention is ours, behind the fastest forward that is right on its device.

    The other arguments are those of `load_target`.
    """
    decoder = TransformersDecoder(model)
    page_size = find_varlen_page_size(facts)
    block_size = page_size or block_size
    num_blocks = max(1, kv_tokens // block_size) if kv_tokens else _num_blocks(facts, kv_bytes, block_size)
    backend = TransformersBackend(decoder, facts, num_blocks=num_blocks, block_size=block_size)
    reference = probe(backend)
    if page_size is not None:
        use_varlen_if_right(backend, reference)
    if is_lean and can_be_lean(model, facts.device, facts.dtype):
        use_lean_if_right(backend, model, reference)
    use_exact_rows(backend, exact_rows)
    if facts.device.startswith("cuda"):
        backend.has_device_logits = has_device_kernels(facts.device, facts.vocab_size, facts.num_tokens)
    return backend


def _check_device(device: str) -> None:
    import torch

    if device == "cpu":
        return
    kind, _, index = device.partition(":")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise ModelError(f"device {device!r} is not cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ModelError(f"device {device!r} was asked for, and torch finds no CUDA device")
    if index and int(index) >= torch.cuda.device_count():
        raise ModelError(f"device {device!r} does not exist: {torch.cuda.device_count()} CUDA device(s)")


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences progress bars, advice and warnings on stderr while loading, and restores the settings."""
    from transformers.utils import logging as hf_logging

    verbosity, had_bar = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if had_bar:
            hf_logging.enable_progress_bar()


def _load_config(directory: Path, config_json: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = config_json["model_type"]
    if model_type not in CONFIG_MAPPING:
        code = " (it brings its own code, which is never run)" if config_json.get("auto_map") else ""
        raise ModelError(f"model type {model_type!r} is unknown to the installed transformers{code}")
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{directory / 'config.json'} is not a usable configuration: {error}") from error


def _max_context(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"the configuration of model type {config.model_type!r} has no max_position_embeddings")


def _load_model(directory: Path, config: Any, device: str, dtype: str) -> Any:
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    from outrider.cloud_verifier.backends.attention import ATTENTION_NAME, register_attention

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"model type {config.model_type!r} is not a decoder language model")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelError(f"model type {config.model_type!r} does not take its attention from outside")
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise ModelError(f"model type {config.model_type!r} cannot return single logit rows")
    register_attention()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # safetensors, transformers and torch each raise their own kinds here
        raise ModelError(f"{directory} cannot be loaded: {error}") from error
    return model.to(device).eval().requires_grad_(False)


def _facts(directory: Path, model: Any, max_context: int, device: str, dtype: str) -> TargetFacts:
    from outrider.common.models import fingerprint

    config = model.config
    tokenizer_json = directory / "tokenizer.json"
    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    num_tokens = fingerprint.num_tokens(tokenizer_json)
    if num_tokens > vocab_size:
        raise ModelError(f"{tokenizer_json} has {num_tokens} tokens, the model's vocabulary {vocab_size}")
    num_heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    content = [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
    return TargetFacts(
        num_tokens=num_tokens,
        vocab_size=vocab_size,
        max_context=max_context,
        dtype=dtype,
        device=device,
        model_id=directory.resolve().name,
        fingerprint=fingerprint.directory_fingerprint(content),
        tokenizer_fingerprint=fingerprint.tokenizer_fingerprint(tokenizer_json),
        eos_token_ids=_eos_token_ids(directory, config),
        num_layers=int(config.num_hidden_layers),
        num_heads=num_heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
        head_dim=int(head_dim),
    )


def _eos_token_ids(directory: Path, config: Any) -> tuple[int, ...]:
    """Returns the end-of-text ids: generation_config.json's first, for chat models list several there."""
    value = None
    with contextlib.suppress(OSError, ValueError):
        text = (directory / "generation_config.json").read_text(encoding="utf-8")
        value = json.loads(text).get("eos_token_id")
    if value is None:
        value = getattr(config, "eos_token_id", None)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    return tuple(sorted({int(i) for i in ids}))


def _num_blocks(facts: TargetFacts, kv_bytes: int, block_size: int) -> int:
    num_blocks = kv_bytes // (facts.kv_bytes_per_token * block_size)
    if num_blocks * block_size < MIN_KV_TOKENS:
        per_token = facts.kv_bytes_per_token
        least = math.ceil(MIN_KV_TOKENS / block_size) * block_size * per_token
        raise ModelError(
            f"a KV pool (--kv-memory) of {kv_bytes} bytes holds {num_blocks * block_size} tokens of "
            f"{facts.model_id} ({per_token} bytes each): it takes {math.ceil(least / 1024)}KiB at least"
        )
    return num_blocks
