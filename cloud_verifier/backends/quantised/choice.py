"""Which quantised weights are served: by `--quantize`, or by what a directory's config.json says. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.common.config.loader import did_you_mean
from outrider.common.errors import ConfigError, ModelError

NF4, FP4, FP8, NONE = "nf4", "fp4", "fp8", "none"
CHOICES = (NONE, NF4)
_INT8_NAMES = ("int8", "8bit", "llm.int8", "llm_int8", "llm.int8()")
_INT8_REASON = (
    "LLM.int8 takes a column out of int8 for all rows of a step where any one exceeds its threshold, so that one "
    "tenant's text changes another's"
)
# Packages without which transformers cannot read them, none of which an extra of ours installs.
_PACKAGES = {
    "gptq": "optimum and gptqmodel",
    "awq": "gptqmodel",
    "compressed-tensors": "compressed-tensors",
    "torchao": "torchao",
    "quanto": "optimum-quanto",
    "fbgemm_fp8": "fbgemm-gpu",
    "aqlm": "aqlm",
}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Says how a target's weights are quantised."""

    name: str  # "nf4", "fp4" or "fp8"
    is_in_files: bool  # the directory has them so; else they are quantised as they are loaded

    @property
    def is_four_bit(self) -> bool:
        """Returns whether they stay so in memory; FP8 is read into the target's dtype."""
        return self.name in (NF4, FP4)


def parse_quantize(text: str) -> str:
    """Returns the name of `--quantize`, "" for none. Raises `ConfigError` for any other, with the reason."""
    name = text.strip().lower()
    if name in _INT8_NAMES:
        raise ConfigError(f"--quantize {text}: {_INT8_REASON}; use nf4")
    if name not in CHOICES:
        hint = did_you_mean(name, CHOICES)
        raise ConfigError(
            f"--quantize {text}: there is no such quantisation{hint} There are {', '.join(CHOICES)}"
        )
    return "" if name == NONE else name


def find_quantisation(config_json: Mapping[str, Any], asked: str, model_id: str) -> Quantisation | None:
    """Returns how the weights of a directory with this config.json are to be kept, None for as they are; `asked` is
    what `parse_quantize` returns.

    Raises `ModelError` by name for weights that somebody quantised in a way that is not served.
    """
    fields = config_json.get("quantization_config")
    if not fields:
        return Quantisation(asked, is_in_files=False) if asked else None
    if not isinstance(fields, Mapping):
        raise ModelError(f"{model_id}: quantization_config in config.json is not an object")
    found = Quantisation(_name_in_files(fields, model_id), is_in_files=True)
    if asked and asked != found.name:
        raise ModelError(
            f"--quantize {asked}: the weights of {model_id} are {found.name} already; leave it out"
        )
    return found


def _name_in_files(fields: Mapping[str, Any], model_id: str) -> str:
    method = str(fields.get("quant_method") or ("bitsandbytes" if _has_bits(fields) else "an unnamed method"))
    if method == "bitsandbytes" or _has_bits(fields):
        kind = fields.get("bnb_4bit_quant_type", FP4)
        if fields.get("load_in_8bit"):
            raise _refusal(model_id, "bitsandbytes' LLM.int8", _INT8_REASON)
        if not fields.get("load_in_4bit") or kind not in (NF4, FP4):
            raise _refusal(model_id, "bitsandbytes", f"its 4 bits must be nf4 or fp4, and are {kind!r}")
        return str(kind)
    if method == FP8:
        return FP8
    package = _PACKAGES.get(method)
    needs = f"transformers reads them by {package}, which no extra installs; " if package else ""
    raise _refusal(model_id, method, f"{needs}its kernels were never checked here")


def _has_bits(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("load_in_4bit") or fields.get("load_in_8bit"))


def _refusal(model_id: str, method: str, reason: str) -> ModelError:
    return ModelError(
        f"the weights of {model_id} are quantised by {method} (config.json), which is not served: {reason}; name the "
        "model that it was made from, with --quantize nf4, or one saved with bitsandbytes' NF4"
    )
