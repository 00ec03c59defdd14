"""Loads a model that our own decoder does not compute: any decoder of transformers that `architectures` allows."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.cloud_verifier.backends.architectures import check_supported
from outrider.cloud_verifier.backends.attention import ATTENTION_NAME, ForwardPlan, register_attention
from outrider.cloud_verifier.backends.products.row_plan import MatrixKind, Product
from outrider.cloud_verifier.backends.products.ways import Linear
from outrider.cloud_verifier.backends.transformers_backend import Decoder
from outrider.cloud_verifier.backends.weights import Weights
from outrider.common.errors import ModelError

logger = logging.getLogger(__name__)


def load_through_transformers(
    directory: Path, config_json: dict[str, Any], weights: Weights, dtype: str
) -> tuple[Any, TransformersDecoder]:
    """Returns a model's configuration, with all fields named as Llama's, and its decoder, on the device of `weights`.

    Raises `ModelError` for an unknown or unsupported model type and for weights that cannot be loaded.
    """
    with quiet_transformers():
        config = _load_config(directory, config_json)
        config.max_position_embeddings = _max_context(config)
        check_supported(config, config.max_position_embeddings)
        _check_class(config)
        model = None if weights.device == "cpu" else load_directly(config, weights)
        if model is None:
            model = _load_by_host(directory, config, weights.device, dtype)
    config.vocab_size = int(model.get_output_embeddings().weight.shape[0])
    return config, TransformersDecoder(model)


class TransformersDecoder(Decoder):
    """Runs any transformers decoder whose attention is ours."""

    is_of_transformers = True
    writes_padding = False

    def __init__(self, model: Any) -> None:
        self._model = model

    def use_exact_rows(self) -> None:
        """Changes nothing: the model's own code is all there is."""

    def use_linear(self, linear: Linear) -> None:
        for module in self._matrices():
            module.__dict__.pop("forward", None)
        if linear is torch.nn.functional.linear:
            return
        for module in self._matrices():
            if type(module).forward not in (torch.nn.Linear.forward, _conv1d().forward):
                raise ModelError(f"a {type(module).__name__} multiplies by code of its own")
        for module in self._matrices():
            module.forward = partial(_forward, module, linear)

    def matrix_kinds(self) -> list[MatrixKind]:
        kinds: dict[tuple[object, ...], MatrixKind] = {}
        for name, parameter in self._model.named_parameters():
            if parameter.ndim > 2:
                raise ModelError(f"parameter {name} has {parameter.ndim} dimensions: no plain matrix")
        for module in self._matrices():
            weight = module.weight
            num_outputs, num_inputs = reversed(weight.shape) if _is_transposed(module) else weight.shape
            key = (type(module), num_inputs, num_outputs, getattr(module, "bias", None) is None)
            kinds[key] = MatrixKind(num_inputs, num_outputs, partial(_module_product, module))
        return list(kinds.values())

    def _matrices(self) -> list[Any]:
        """Returns the modules that multiply by a matrix."""
        modules = [each for each in self._model.modules() if not isinstance(each, torch.nn.Embedding)]
        return [each for each in modules if getattr(getattr(each, "weight", None), "ndim", 0) == 2]

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, plan: ForwardPlan
    ) -> torch.Tensor:
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
            output_hidden_states=bool(plan.feature_layers),
            outrider_plan=plan,
        )
        for (
            layer
        ) in plan.feature_layers:  # the first state is the embedding, the last is after the final norm
            states = output.hidden_states
            plan.features[layer] = states[min(layer + 1, len(states) - 1)][0]
        logits: torch.Tensor = output.logits[0]
        return logits

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self._model.get_input_embeddings()(token_ids)
        return embedded

    def score(self, features: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.get_output_embeddings()(features)
        return logits


def _conv1d() -> Any:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def _is_transposed(module: Any) -> bool:
    """Returns whether its weight is [in, out], as in GPT-2's Conv1D."""
    return not isinstance(module, torch.nn.Linear)


def _forward(module: Any, linear: Linear, x: torch.Tensor) -> torch.Tensor:
    weight = module.weight.t() if _is_transposed(module) else module.weight
    return linear(x, weight, module.bias)


def _module_product(module: Any, weight: torch.Tensor) -> Product:
    """Returns what `module` computes with another weight, its bias left out where that is a number added last."""
    other = copy.copy(module)
    other._parameters = dict(module._parameters)
    weight = weight.t().contiguous() if _is_transposed(module) else weight
    other.weight = torch.nn.Parameter(weight, requires_grad=False)
    if other._parameters.get("bias") is not None:
        other.bias = torch.nn.Parameter(torch.zeros_like(module.bias), requires_grad=False)
    if isinstance(forward := module.__dict__.get("forward"), partial):  # of `use_linear`
        other.forward = partial(_forward, other, forward.args[1])
    return lambda x: other(x[None])[0]


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


def _check_class(config: Any) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"model type {config.model_type!r} is not a decoder language model")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelError(f"model type {config.model_type!r} does not take its attention from outside")
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise ModelError(f"model type {config.model_type!r} cannot return single logit rows")
    register_attention()


def load_directly(config: Any, weights: Weights) -> Any:
    """Returns a model made on the device of `weights`, each tensor copied there from its file; None where names or
    dtypes are not simply those of the files, so that transformers must convert them."""
    with torch.device("meta"):
        model = _make_model(config, weights.dtype)
    if not _is_simple(model, weights):
        return None
    with torch.device(weights.device):
        model = _make_model(config, weights.dtype)
    tensors = _tensors(model)
    with torch.no_grad():
        for name in sorted(weights.names):
            tensors[name].copy_(weights.read(name, *tensors[name].shape))
    return model.eval().requires_grad_(False)


def _make_model(config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)


def _is_simple(model: Any, weights: Weights) -> bool:
    tensors = _tensors(model)
    if getattr(model, "_keep_in_fp32_modules_strict", None) or weights.names - tensors.keys():
        return False
    read = {id(tensors[name]) for name in weights.names}
    return all(id(parameter) in read for parameter in model.parameters())


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by all of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def _load_by_host(directory: Path, config: Any, device: str, dtype: str) -> Any:
    """Returns a model that transformers loads into the host's memory and then moves."""
    from transformers import AutoModelForCausalLM

    if device != "cpu":
        logger.info("the weights of %s pass through the host's memory", directory.name)
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
