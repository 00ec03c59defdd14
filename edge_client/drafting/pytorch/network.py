"""Loads a Hugging Face directory with transformers, for drafting: its weights as asked, its attention ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from outrider.common.errors import ModelError, UsageError
from outrider.common.process.quiet_loading import quiet_loading
from outrider.edge_client.drafting.backend import FP8, NF4, BackendSettings
from outrider.edge_client.drafting.pytorch.architecture import check_decoder, max_context, num_tokens
from outrider.edge_client.drafting.pytorch.attention import ATTENTION_NAME, Run, register_attention
from outrider.edge_client.drafting.pytorch.quantised import num_weight_bytes, quantise_layers
from outrider.edge_client.drafting.spec import GRAPH_FILE, SPEC_FILE, TOKENIZER_FILE
from outrider.kernels.fp8 import FP8 as E4M3


@dataclass(frozen=True, slots=True)
class Network:
    """Holds a loaded model and what its sequences need to know of it."""

    model: Any
    device: torch.device
    dtype: torch.dtype  # of products and states
    weights: str  # nf4, fp8, bfloat16 or float32
    num_tokens: int
    max_context: int
    has_fp8_kv: bool

    def __call__(self, token_ids: list[int], positions: list[int], run: Run, num_rows: int) -> torch.Tensor:
        """Returns the logits [num_rows, num_tokens] in float32 after the last of the tokens, whose KV is written."""
        inputs = torch.tensor([token_ids, positions], device=self.device)
        output = self.model(
            input_ids=inputs[:1],
            position_ids=inputs[1:],
            use_cache=False,
            logits_to_keep=num_rows,
            outrider_run=run,
        )
        return output.logits[0, :, : self.num_tokens].float()  # type: ignore[no-any-return]

    @property
    def num_weight_bytes(self) -> int:
        """Returns the size of the weights in bytes."""
        return num_weight_bytes(self.model)

    @property
    def runtime(self) -> str:
        """Returns what computes, and with which numbers."""
        dtype = str(self.dtype).removeprefix("torch.")
        kv = FP8 if self.has_fp8_kv else dtype
        size = f"{self.num_weight_bytes / 1e6:.0f} MB"
        return f"torch {torch.__version__} on {self.device}, {self.weights} weights ({size}), {kv} KV"


def load_network(
    directory: Path, tokenizer_json: Path, settings: BackendSettings, first_layers: int | None = None
) -> Network:
    """Returns the model of a directory, or its first layers with its norm and head, for the ids of a tokenizer.

    Raises `ModelError` for a directory that is incomplete, unsafe (pickled weights, remote code), already quantised or
    of an architecture whose attention is not what the draft computes; `UsageError` for a device that is not there or
    cannot do what was asked.
    """
    config_json = _read_config(directory)
    device = _choose_device(settings)
    _check_fp8(settings, device)
    weights, dtype = _choose_weights(settings.weights, device)
    with quiet_loading(hf_logging):
        config = _load_config(directory, config_json, first_layers)
        model = _load_model(directory, config, dtype)
        try:
            if weights in (NF4, FP8) and not quantise_layers(model, weights, device):
                raise ModelError(
                    f"{directory} has no linear layers that --draft-weights {weights} could quantise"
                )
            model = model.to(device).eval().requires_grad_(False)
        except RuntimeError as error:  # of torch: too little memory, mostly
            raise ModelError(f"{directory} cannot be loaded on {device}: {_first_line(error)}") from error
    count = num_tokens(model, tokenizer_json)
    return Network(model, device, dtype, weights, count, max_context(config), settings.kv_dtype == FP8)


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory")
    path = directory / "config.json"
    if not path.is_file():
        if (directory / GRAPH_FILE).is_file() or (directory / SPEC_FILE).is_file():
            raise ModelError(
                f"{directory} is an exported ONNX draft: --draft-backend torch reads the Hugging Face directory that "
                "it was exported from (config.json, *.safetensors, tokenizer.json); name that with --draft, or leave "
                "--draft-backend out"
            )
        raise ModelError(f"{directory} has no config.json: not a Hugging Face model directory")
    for name, pattern in ((TOKENIZER_FILE, TOKENIZER_FILE), ("safetensors", "*.safetensors")):
        if not any(directory.glob(pattern)):
            raise ModelError(f"{directory} has no {name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ModelError(f"{path} names no model_type")
    if quantisation := content.get("quantization_config"):
        method = quantisation.get("quant_method", "unnamed") if isinstance(quantisation, dict) else "unnamed"
        raise ModelError(
            f"{directory} is already quantised ({method}); --draft-weights quantises the original weights"
        )
    return content


def _choose_device(settings: BackendSettings) -> torch.device:
    name = settings.device
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--draft-device {name} cannot be used: {_first_line(error)}") from error
    return device


def _has_fp8(device: torch.device) -> bool:
    try:
        torch.zeros(1, device=device).to(E4M3).float().cpu()
    except (RuntimeError, TypeError):
        return False
    return True


def _check_fp8(settings: BackendSettings, device: torch.device) -> None:
    flags = {"--draft-weights": settings.weights, "--draft-kv-dtype": settings.kv_dtype}
    for flag, value in flags.items():
        if value == FP8 and not _has_fp8(device):
            raise UsageError(
                f"{flag} fp8 does not go with --draft-device {device}: torch has no such numbers there"
            )


def _choose_weights(name: str, device: torch.device) -> tuple[str, torch.dtype]:
    """Returns what the weights are, and the dtype to compute in."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    if name == NF4 and device.type not in ("cpu", "cuda", "xpu"):
        raise UsageError(
            f"--draft-weights nf4 does not go with --draft-device {device}: bitsandbytes would download its kernels; "
            "use bfloat16"
        )
    if name in (NF4, FP8):
        return name, torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return name, dtype


def _load_config(directory: Path, config_json: dict[str, Any], first_layers: int | None) -> Any:
    model_type = config_json["model_type"]
    if model_type not in CONFIG_MAPPING:
        code = " (it brings its own code, which is never run)" if config_json.get("auto_map") else ""
        raise ModelError(
            f"{directory}: model type {model_type!r} is unknown to the installed transformers{code}"
        )
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{directory / 'config.json'} is not usable: {_first_line(error)}") from error
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    check_decoder(config, model_class, directory)
    if first_layers is not None:
        config.num_hidden_layers = first_layers
    return config


def _load_model(directory: Path, config: Any, dtype: torch.dtype) -> Any:
    register_attention()
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # safetensors, transformers and torch each raise their own kinds here
        raise ModelError(f"{directory} cannot be loaded: {_first_line(error)}") from error
    if missing := sorted(told["missing_keys"]):
        raise ModelError(
            f"{directory} has no tensor {missing[0]!r}, and {len(missing) - 1} others are missing"
        )
    return model


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
