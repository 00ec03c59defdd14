"""Loads a local Hugging Face directory as a `TargetBackend`. Nothing is ever downloaded."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from outrider.cloud_verifier.backends.architectures import check_supported, layer_windows
from outrider.cloud_verifier.backends.decoder import Decoder
from outrider.cloud_verifier.backends.decoder_config import DecoderConfig, make_decoder_config, with_defaults
from outrider.cloud_verifier.backends.exact_rows import use_exact_rows
from outrider.cloud_verifier.backends.facts import TargetFacts
from outrider.cloud_verifier.backends.memory import check_weights_fit, kv_pool_bytes
from outrider.cloud_verifier.backends.model_files import check_model_files
from outrider.cloud_verifier.backends.paged_backend import BLOCK_SIZE, PagedBackend
from outrider.cloud_verifier.backends.probes import check_own_attention, probe, use_paged_kernel
from outrider.cloud_verifier.backends.quantised.choice import Quantisation, find_quantisation
from outrider.cloud_verifier.backends.weights import Progress, Weights
from outrider.cloud_verifier.verification.row_kernels import has_device_kernels
from outrider.common.config.units import show_size
from outrider.common.errors import ModelError

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16")
DECODERS = ("auto", "lean", "cuda", "transformers")
KV_DTYPES = ("auto", "fp8")
MIN_KV_TOKENS = 256
STEP_TOKENS = 512  # of the largest step, where nobody says


def load_target(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    kv_dtype: str = "auto",
    quantize: str = "",
    kv_bytes: int | None = None,
    kv_tokens: int | None = None,
    step_tokens: int = STEP_TOKENS,
    heads_bytes: int = 0,
    block_size: int = BLOCK_SIZE,
    num_threads: int = 0,
    decoder: str = "auto",
    exact_rows: str = "auto",
    on_progress: Progress | None = None,
) -> PagedBackend:
    """Loads a decoder from a local directory (config.json, tokenizer.json, *.safetensors).

    `device` is "cpu", "cuda", "cuda:N" or "auto" (see `resolve_device`); `dtype` "float32", "bfloat16" or "auto"
    (float32 on a CPU, bfloat16 on CUDA and where weights are quantised); `quantize` "" or "nf4" (a directory whose
    weights are quantised needs none); `kv_dtype` that of keys and values: "auto", which is `dtype`, or "fp8"
    (`kernels.fp8`); `kv_bytes` the size of the KV pool for all sequences, or `kv_tokens` the same in tokens (of
    neither: 512 MiB on a CPU, on CUDA what is free beside the weights, a step of `step_tokens` and the `heads_bytes` of
    what is loaded later); `block_size` the tokens of a block; `num_threads` torch's CPU threads (0 leaves torch's own
    choice; a setting of the whole process); `decoder` is "lean" or "cuda", our own for a CPU and for CUDA, for the
    models that they compute, or "transformers", which is used for all others too; "auto" is that of the device;
    `exact_rows` "auto", "on" or "off" (see `exact_rows.use_exact_rows`); `on_progress` is called as weights are read.
    Raises `ModelError` for a directory that is incomplete, unsafe (pickled weights, remote code), quantised in a way
    that is not served or of an architecture that the packed forward does not compute, where the device has too little
    memory, and where `exact_rows` is "on" and rows differ; `MissingExtraError` for quantised weights without the extra.
    """
    directory = Path(path)
    config_json = check_model_files(directory)
    quantisation = find_quantisation(config_json, quantize, directory.name)
    device = resolve_device(device)
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") or quantisation else "float32"
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    if kv_dtype not in KV_DTYPES:
        raise ModelError(f"kv_dtype {kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
    if num_threads:
        torch.set_num_threads(num_threads)
    if decoder not in DECODERS:
        raise ModelError(f"decoder {decoder!r} is not one of {', '.join(DECODERS)}")
    if decoder == "auto":
        decoder = "lean" if device == "cpu" else "cuda"
    if quantisation is not None:
        decoder = "transformers"
    with Weights(directory, device, getattr(torch, dtype), on_progress) as weights:
        if quantisation is None or not quantisation.is_four_bit:
            check_weights_fit(weights.num_bytes, directory.name, dtype, device)
        config, loaded = _load_decoder(directory, config_json, weights, decoder, quantisation)
    return make_backend(
        loaded,
        _facts(directory, config, device, dtype, quantisation, has_fp8_kv=kv_dtype == "fp8"),
        kv_bytes=kv_bytes,
        kv_tokens=kv_tokens,
        step_tokens=step_tokens,
        heads_bytes=heads_bytes,
        block_size=block_size,
        exact_rows=exact_rows,
    )


def make_backend(
    decoder: Decoder,
    facts: TargetFacts,
    *,
    kv_bytes: int | None = None,
    kv_tokens: int | None = None,
    step_tokens: int = STEP_TOKENS,
    heads_bytes: int = 0,
    block_size: int = BLOCK_SIZE,
    exact_rows: str = "auto",
) -> PagedBackend:
    """Returns a decoder over a KV pool, with the fastest attention that is right on its device.

    The other arguments are those of `load_target`. Raises `ModelError` where the decoder cannot run so.
    """
    if kv_tokens:
        num_blocks = max(1, kv_tokens // block_size)
    else:
        num_bytes = kv_pool_bytes(facts, decoder, kv_bytes, step_tokens, heads_bytes)
        num_blocks = _num_blocks(facts, num_bytes, block_size)
    try:
        backend = PagedBackend(decoder, facts, num_blocks=num_blocks, block_size=block_size)
    except (MemoryError, torch.OutOfMemoryError) as error:
        size = show_size(num_blocks * block_size * facts.kv_bytes_per_token)
        raise ModelError(f"--kv-memory: there is no memory for a KV pool of {size}: {error}") from error
    reference = probe(backend)
    check_own_attention(backend, reference)
    is_on_gpu = facts.device.startswith("cuda")
    if is_on_gpu:
        use_paged_kernel(backend, reference)
    use_exact_rows(backend, exact_rows)
    if is_on_gpu:
        backend.has_device_logits = has_device_kernels(facts.device, facts.vocab_size, facts.num_tokens)
    return backend


def _load_decoder(
    directory: Path,
    config_json: dict[str, Any],
    weights: Weights,
    name: str,
    quantisation: Quantisation | None,
) -> tuple[Any, Decoder]:
    """Returns a model's configuration and decoder: that of `name`, or transformers' for models that ours do not
    compute."""
    from outrider.cloud_verifier.backends.cuda.decoder import CudaDecoder
    from outrider.cloud_verifier.backends.cuda.graphs import CudaCapture
    from outrider.cloud_verifier.backends.lean import LeanDecoder

    try:
        if name != "transformers" and (config := _own_config(directory, config_json)) is not None:
            if name == "lean":
                return config, LeanDecoder(config, weights)
            capture = None if weights.device == "cpu" else CudaCapture(torch.device(weights.device))
            return config, CudaDecoder(config, weights, capture=capture)
        from outrider.cloud_verifier.backends.through_transformers import load_through_transformers

        return load_through_transformers(directory, config_json, weights, quantisation)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the weights of {directory.name} do not fit on {weights.device}: {error}; name another --device, or a "
            "smaller --target"
        ) from error


def _own_config(directory: Path, config_json: dict[str, Any]) -> DecoderConfig | None:
    """Returns the configuration of a model that our own decoder computes, None for another."""
    try:
        if (fields := with_defaults(config_json)) is None:
            return None
        config = make_decoder_config(fields)
        if config is not None and config.model_type == "llama" and any(config.windows):
            return None  # a window that Llama's code in transformers does not follow, and so refused there
        if config is not None:
            check_supported(SimpleNamespace(**fields), config.max_position_embeddings)
        return config
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{directory / 'config.json'} is not a usable configuration: {error}") from error


def resolve_device(device: str) -> str:
    """Returns "cpu", "cuda" or "cuda:N"; "auto" is the first CUDA device, else the CPU. Raises `ModelError` for a
    device that this machine does not have."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return device
    kind, _, index = device.partition(":")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise ModelError(f"device {device!r} is not cpu, cuda or cuda:N, or auto")
    if not torch.cuda.is_available():
        raise ModelError(f"device {device!r} was asked for (--device), and torch finds no CUDA device")
    if index and int(index) >= torch.cuda.device_count():
        raise ModelError(
            f"device {device!r} does not exist: {torch.cuda.device_count()} CUDA device(s), from cuda:0 on"
        )
    return device


def _facts(
    directory: Path,
    config: Any,
    device: str,
    dtype: str,
    quantisation: Quantisation | None,
    *,
    has_fp8_kv: bool,
) -> TargetFacts:
    from outrider.common.models import fingerprint

    tokenizer_json = directory / "tokenizer.json"
    vocab_size = config.vocab_size
    num_tokens = fingerprint.num_embedded_tokens(tokenizer_json, vocab_size)
    num_heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    is_own = isinstance(config, DecoderConfig)
    changes = [] if dtype == "float32" else [f"dtype={dtype}"]
    if quantisation is not None and not quantisation.is_in_files:
        changes.append(f"weights={quantisation.name}")
    if has_fp8_kv:
        changes.append("kv=fp8")
    of_files = fingerprint.target_fingerprint(directory)
    return TargetFacts(
        num_tokens=num_tokens,
        vocab_size=vocab_size,
        max_context=config.max_position_embeddings,
        dtype=dtype,
        device=device,
        model_id=directory.resolve().name,
        fingerprint=fingerprint.served_fingerprint(of_files, changes),
        files_fingerprint=of_files,
        quantisation="" if quantisation is None else quantisation.name,
        tokenizer_fingerprint=fingerprint.tokenizer_fingerprint(tokenizer_json),
        eos_token_ids=_eos_token_ids(directory, config, vocab_size),
        num_layers=int(config.num_hidden_layers),
        num_heads=num_heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
        head_dim=int(head_dim),
        windows=config.windows if is_own else layer_windows(config, config.max_position_embeddings),
        has_fp8_kv=has_fp8_kv,
    )


def _eos_token_ids(directory: Path, config: Any, vocab_size: int) -> tuple[int, ...]:
    """Returns the end-of-text ids: generation_config.json's first, for chat models list several there. Raises
    `ModelError` for what is no number."""
    value = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        text = (directory / "generation_config.json").read_text(encoding="utf-8")
        value = json.loads(text).get("eos_token_id")
    if value is None:
        value = getattr(config, "eos_token_id", None)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(each) is int for each in ids):
        raise ModelError(f"{directory}: eos_token_id is {value!r}; want an id, or a list of them")
    known = {each for each in ids if 0 <= each < vocab_size}
    if others := sorted(set(ids) - known):  # as where a small vocabulary kept a family's default
        log.warning("%s: eos_token_id %s is no id of the model, and left out", directory, others)
    return tuple(sorted(known))


def _num_blocks(facts: TargetFacts, kv_bytes: int, block_size: int) -> int:
    num_blocks = kv_bytes // (facts.kv_bytes_per_token * block_size)
    if num_blocks * block_size < MIN_KV_TOKENS:
        per_token = facts.kv_bytes_per_token
        least = math.ceil(MIN_KV_TOKENS / block_size) * block_size * per_token
        raise ModelError(
            f"a KV pool (--kv-memory) of {show_size(kv_bytes)} holds {num_blocks * block_size} tokens of "
            f"{facts.model_id} ({per_token} bytes each): it takes {math.ceil(least / 1024)}KiB at least"
        )
    return num_blocks
