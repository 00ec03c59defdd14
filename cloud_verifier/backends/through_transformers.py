"""Loads a model that our own decoder does not compute: any decoder of transformers that `architectures` allows."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.cloud_verifier.backends import model_ends
from outrider.cloud_verifier.backends.architectures import check_supported
from outrider.cloud_verifier.backends.attention.plan import ATTENTION_NAME, ForwardPlan, register_attention
from outrider.cloud_verifier.backends.decoder import Decoder
from outrider.cloud_verifier.backends.memory import check_weights_fit
from outrider.cloud_verifier.backends.products.row_plan import MatrixKind, Product
from outrider.cloud_verifier.backends.products.ways import Linear
from outrider.cloud_verifier.backends.quantised import four_bit
from outrider.cloud_verifier.backends.quantised.choice import Quantisation
from outrider.cloud_verifier.backends.weights import Weights
from outrider.common.errors import ModelError
from outrider.common.process.extras import needs_extra
from outrider.common.process.quiet_loading import quiet_loading

logger = logging.getLogger(__name__)


def load_through_transformers(
    directory: Path,
    config_json: dict[str, Any],
    weights: Weights,
    quantisation: Quantisation | None = None,
) -> tuple[Any, TransformersDecoder]:
    """Returns a model's configuration, with all fields named as Llama's, and its decoder, on the device of `weights`.

    Raises `ModelError` for an unknown or unsupported model type and for weights that cannot be loaded,
    `MissingExtraError` for quantised ones without the packages that read them.
    """
    from transformers.utils import logging as hf_logging

    with quiet_loading(hf_logging):
        config = _load_config(directory, config_json)
        model = None
        if quantisation is not None:
            model = _load_quantised(directory, config, weights, quantisation)
        elif weights.device != "cpu":
            model = load_directly(config, weights)
        if model is None:
            model = _load_by_host(directory, config, weights)
    config.vocab_size = int(model.get_output_embeddings().weight.shape[0])
    return config, TransformersDecoder(model)


class TransformersDecoder(Decoder):
    """Runs any transformers decoder whose attention is ours."""

    is_of_transformers = True
    writes_padding = False

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def model(self) -> Any:
        """Returns the model that is run."""
        return self._model

    def use_linear(self, linear: Linear) -> None:
        for module in self._matrices():
            module.__dict__.pop("forward", None)
        if linear is torch.nn.functional.linear:
            return
        known = (torch.nn.Linear.forward, _conv1d().forward)
        for module in self._matrices():
            if four_bit.quant_state(module) is None and type(module).forward not in known:
                raise ModelError(f"a {type(module).__name__} multiplies by code of its own")
        for module in self._matrices():
            module.forward = partial(_forward, module, linear)

    def matrix_kinds(self) -> list[MatrixKind]:
        kinds: dict[tuple[object, ...], MatrixKind] = {}
        for name, parameter in self._model.named_parameters():
            if parameter.ndim > 2:
                raise ModelError(f"parameter {name} has {parameter.ndim} dimensions: no plain matrix")
        for module in self._matrices():
            num_outputs, num_inputs = _sizes(module)
            key = (type(module), num_inputs, num_outputs, getattr(module, "bias", None) is None)
            kinds[key] = MatrixKind(num_inputs, num_outputs, partial(_module_product, module))
        return list(kinds.values())

    @property
    def num_weight_bytes(self) -> int:
        return four_bit.num_bytes(self._model)

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

    def own_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns logits [n, vocab_size] of ids [n] with the model's own attention and positions.

        Raises RuntimeError where transformers cannot compute the configuration.
        """
        self._model.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self._model(input_ids=token_ids[None], use_cache=False).logits[0]
        finally:
            self._model.set_attn_implementation(ATTENTION_NAME)
        return logits

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return model_ends.embed(self._model, token_ids)

    def score(self, features: torch.Tensor) -> torch.Tensor:
        return model_ends.score(self._model, features)


def _conv1d() -> Any:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def _is_transposed(module: Any) -> bool:
    """Returns whether its weight is [in, out], as in GPT-2's Conv1D."""
    return not isinstance(module, torch.nn.Linear)


def _sizes(module: Any) -> tuple[int, int]:
    """Returns a matrix's outputs and inputs."""
    if four_bit.quant_state(module) is not None:  # whose tensor has another shape
        return module.out_features, module.in_features
    num_outputs, num_inputs = reversed(module.weight.shape) if _is_transposed(module) else module.weight.shape
    return num_outputs, num_inputs


def _forward(module: Any, linear: Linear, x: torch.Tensor) -> torch.Tensor:
    if four_bit.quant_state(module) is not None:
        return four_bit.multiply_by(linear, module, x)
    weight = module.weight.t() if _is_transposed(module) else module.weight
    return linear(x, weight, module.bias)


def _module_product(module: Any, weight: torch.Tensor) -> Product:
    """Returns what `module` computes with another weight, its bias left out where that is a number added last."""
    forward = module.__dict__.get("forward")
    if four_bit.quant_state(module) is not None:
        if isinstance(forward, partial):  # of `use_linear`: over a whole matrix, whatever it is made of
            multiply: Linear = forward.args[1]
            return lambda x: multiply(x, weight, None)
        return four_bit.other_product(module, weight)
    other = copy.copy(module)
    other._parameters = dict(module._parameters)
    weight = weight.t().contiguous() if _is_transposed(module) else weight
    other.weight = torch.nn.Parameter(weight, requires_grad=False)
    if other._parameters.get("bias") is not None:
        other.bias = torch.nn.Parameter(torch.zeros_like(module.bias), requires_grad=False)
    if isinstance(forward, partial):  # of `use_linear`
        other.forward = partial(_forward, other, forward.args[1])
    return lambda x: other(x[None])[0]


def _load_config(directory: Path, config_json: dict[str, Any]) -> Any:
    """Returns a configuration that the packed forward computes. Raises `ModelError`."""
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = config_json["model_type"]
    if model_type not in CONFIG_MAPPING:
        code = " (it brings its own code, which is never run)" if config_json.get("auto_map") else ""
        raise ModelError(f"model type {model_type!r} is unknown to the installed transformers{code}")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        if config.get_text_config() is not config:
            raise ModelError(
                f"model type {model_type!r} reads more than text: a target is a decoder of text alone, such as a "
                "checkpoint of the same family without images has"
            )
        config.max_position_embeddings = _max_context(config)
        check_supported(config, config.max_position_embeddings)
        if min(int(config.num_hidden_layers), int(config.num_attention_heads)) < 1:
            raise ValueError("a model has layers and attention heads")
    except ModelError:
        raise
    except Exception as error:  # transformers has kinds of its own for fields of another type
        raise ModelError(f"{directory / 'config.json'} is not a usable configuration: {error}") from error
    _check_class(config)
    return config


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
    return all(id(parameter) in read for parameter in model.parameters()) and _are_tied_alike(
        tensors, weights
    )


def _are_tied_alike(tensors: Mapping[str, torch.Tensor], weights: Weights) -> bool:
    """Returns whether names in the files that are one tensor of the model are one there too: where config.json ties two
    that differ, transformers keeps both."""
    first: dict[int, str] = {}
    for name in sorted(weights.names):
        other = first.setdefault(id(tensors[name]), name)
        shape = tensors[name].shape
        if other != name and not torch.equal(weights.read(other, *shape), weights.read(name, *shape)):
            return False
    return True


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by all of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def _load_quantised(directory: Path, config: Any, weights: Weights, quantisation: Quantisation) -> Any:
    """Returns a model whose weights transformers reads as they are quantised, or quantises one by one."""
    of_files = f"reading the {quantisation.name} weights of {directory.name}"
    what = of_files if quantisation.is_in_files else f"--quantize {quantisation.name}"
    if not quantisation.is_four_bit:
        return _load_fp8(directory, config, weights, what)
    four_bit.import_bitsandbytes(what)
    with torch.device("meta"):
        num_bytes = four_bit.num_four_bit_bytes(
            _make_model(_unquantised(config), weights.dtype), weights.dtype
        )
    check_weights_fit(num_bytes, directory.name, quantisation.name, weights.device)
    chosen = four_bit.make_config(quantisation, weights.dtype, weights.device)
    if quantisation.is_in_files:  # which says how, but not in which dtype this device is fast
        given = dict(config.quantization_config)
        given["bnb_4bit_compute_dtype"] = chosen.to_dict()["bnb_4bit_compute_dtype"]
        config.quantization_config, chosen = given, None
    model = _from_pretrained(
        directory, config, weights, quantization_config=chosen, device_map={"": weights.device}
    )
    four_bit.prepare(model)
    return model.eval().requires_grad_(False)


def _load_fp8(directory: Path, config: Any, weights: Weights, what: str) -> Any:
    """Returns a model whose matrices are read into the dtype of `weights`: transformers' kernels for FP8 come from
    Hugging Face's hub, and no CPU has any."""
    with needs_extra(four_bit.EXTRA, what):
        importlib.import_module("accelerate")
    config.quantization_config = {**config.quantization_config, "dequantize": True}
    model = _load_by_host(directory, config, weights)
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:  # as transformers reads them
            parameter.data = parameter.data.to(weights.dtype)
    return model


def _unquantised(config: Any) -> Any:
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def _load_by_host(directory: Path, config: Any, weights: Weights) -> Any:
    """Returns a model that transformers loads into the host's memory and then moves."""
    if weights.device != "cpu":
        logger.info("the weights of %s pass through the host's memory", directory.name)
    model = _from_pretrained(directory, config, weights)
    return model.to(weights.device).eval().requires_grad_(False)


def _from_pretrained(directory: Path, config: Any, weights: Weights, **more: Any) -> Any:
    """Returns the model. Raises `ModelError` where it cannot be loaded, or a tensor is missing, which transformers
    would draw at random."""
    from transformers import AutoModelForCausalLM

    try:
        with _showing_progress(weights):
            model, found = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=weights.dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **more,
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # safetensors, transformers and torch each raise their own kinds here
        raise ModelError(f"{directory} cannot be loaded: {error}") from error
    if found["missing_keys"]:
        name = min(found["missing_keys"])
        raise ModelError(f"{directory} cannot be loaded: it has no tensor {name!r}")
    return model


@contextlib.contextmanager
def _showing_progress(weights: Weights) -> Iterator[None]:
    """Reports as read the share of the tensors that transformers has loaded, by its hook for progress bars."""
    from transformers.utils import logging as hf_logging

    def hook(make_bar: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Sized):
            args = (_counted(args[0], weights), *args[1:])
        return make_bar(*args, **options)

    set_hook = getattr(hf_logging, "set_tqdm_hook", lambda _: None)  # not of the first of version 5
    before = set_hook(hook)
    try:
        yield
    finally:
        set_hook(before)


def _counted(items: Any, weights: Weights) -> Iterator[Any]:
    for number, item in enumerate(items, start=1):
        yield item
        weights.report(number / len(items))
