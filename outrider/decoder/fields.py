"""Decides what becomes of each field of `SpeculativeConfig`: it is honoured, has no effect for a reason, or is refused
by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path

from outrider.common.errors import ConfigError
from outrider.common.types import LOOKAHEAD
from outrider.decoder.config import DraftStrategy, SpeculativeConfig, TreeStrategy
from outrider.decoder.sources import Site, Source, find_heads, find_source
from outrider.edge_client.config.run_config import default_draft_dir
from outrider.edge_client.drafting.spec import SPEC_FILE, read_spec
from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS

MAX_DEPTH, MAX_TREE_DEPTH = 64, 64  # tokens of a draft, and of a tree's path
QUANT_DTYPES = (None, "int4", "fp8")


@dataclass(frozen=True, slots=True)
class Case:
    """Holds what a field is judged by."""

    config: SpeculativeConfig
    source: Source
    site: Site

    @property
    def is_tree(self) -> bool:
        """Returns whether trees are drafted."""
        return self.config.tree_strategy == TreeStrategy.TREE

    @property
    def is_exported(self) -> bool:
        """Returns whether the draft is an exported one, whose KV is in float32."""
        return self.exported is not None

    @property
    def exported(self) -> Path | None:
        """Returns the directory of an exported draft; None where it is another one."""
        path = self.config.draft_model_path
        if path is None and self.config.draft_strategy == DraftStrategy.SMALL_MODEL:
            return default_draft_dir()
        return Path(path) if path is not None and (Path(path) / SPEC_FILE).is_file() else None

    @property
    def is_prefix(self) -> bool:
        """Returns whether first layers draft."""
        return self.config.draft_strategy == DraftStrategy.PREFIX_LAYERS


def judge_fields(config: SpeculativeConfig, site: Site) -> tuple[Source, dict[str, str]]:
    """Returns what drafts, and the fields without effect with the reasons; all others are honoured. Raises
    `ConfigError` naming the first field that is refused."""
    _check_types(config)
    case = Case(config, find_source(config, site), site)
    reasons = {name: judge(case) for name, judge in FIELDS.items()}
    return case.source, {name: reason for name, reason in reasons.items() if reason}


def refuse(name: str, case: Case, why: str, fix: str = "") -> ConfigError:
    """Returns the error that refuses the value of a field."""
    return ConfigError(f"{name}={getattr(case.config, name)!r} is refused: {why}", fix)


def _check_types(config: SpeculativeConfig) -> None:
    _check_path(config.draft_model_path)
    for field in fields(SpeculativeConfig):
        value, default = getattr(config, field.name), field.default
        wanted: type | tuple[type, ...] = (int, float) if isinstance(default, float) else type(default)
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        is_wrong = default is not None and not isinstance(value, str if isinstance(default, str) else wanted)
        if is_wrong or (is_number and isinstance(value, bool)):
            kind = "text" if isinstance(default, str) else type(default).__name__
            raise ConfigError(f"{field.name} is {value!r}", f"want {kind}")


def _check_path(path: object) -> None:
    if path is not None and not isinstance(path, str | PathLike):
        raise ConfigError(f"draft_model_path is {path!r}", "want the path of a directory")


def _honoured(case: Case) -> str:
    return ""


def _draft_model_path(case: Case) -> str:
    path, source, site = case.config.draft_model_path, case.source, case.site
    if path is not None and not Path(path).is_dir():
        raise refuse("draft_model_path", case, "there is no such directory")
    if source.is_model:
        if path is None and not site.is_local and not case.is_exported:
            why = "the weights of a remote target are not here"
            raise refuse("draft_model_path", case, why, "name a directory")
        return ""
    if path is None:
        if _lacks_heads(case):
            raise refuse("draft_model_path", case, f"{source.colocated} needs a directory", "docs/heads.md")
        return ""
    if source.colocated and not site.is_local:
        return "the verifier's own --heads draft: only tokenizer.json is read"
    if source.colocated == LOOKAHEAD:
        return "lookahead has no weights"
    if case.is_prefix:
        return "the layers are the target's own"
    return "only its tokenizer.json is read" if source.strategy else ""


def _lacks_heads(case: Case) -> bool:
    """Returns whether a directory of heads is needed, and none is shipped for the target."""
    source, target = case.source, case.site.target
    if target is None or case.is_prefix or source.colocated in ("", LOOKAHEAD):
        return False
    if source.is_on_target_kv:
        return case.config.draft_num_layers is None
    return find_heads(source.colocated, target) is None


def _draft_num_layers(case: Case) -> str:
    number, source = case.config.draft_num_layers, case.source
    is_layers = case.is_prefix or source.is_on_target_kv
    if number is None:
        if case.is_prefix and (source.is_model or case.site.is_local):
            raise refuse(
                "draft_num_layers", case, "prefix_layers drafts with the first so many", "give a number"
            )
        return ""
    if not is_layers:
        raise refuse("draft_num_layers", case, "it goes with draft_strategy prefix_layers or early_exit")
    if type(number) is not int or number < 1:
        raise refuse("draft_num_layers", case, "want a number from 1")
    if source.is_on_target_kv and not case.site.is_local:
        return "the verifier's own early exit says how many layers draft"
    if not case.is_prefix and case.config.draft_model_path is not None:
        return "the directory of draft_model_path lists its layers"
    return ""


def _draft_quant_dtype(case: Case) -> str:
    dtype = case.config.draft_quant_dtype
    if dtype not in QUANT_DTYPES:
        raise refuse("draft_quant_dtype", case, "want int4, fp8 or None")
    if dtype is None:
        return ""
    if not case.source.is_model:
        what = "its layers are the target's own" if case.source.is_on_target_kv else "there is no draft model"
        raise refuse("draft_quant_dtype", case, f"with {case.config.draft_strategy} {what}")
    if case.is_prefix and dtype == "fp8":
        raise refuse("draft_quant_dtype", case, "first layers are exported in INT4")
    if case.exported is not None and (found := read_spec(case.exported).precision) != dtype:
        why = f"that draft was exported in {found}"
        raise refuse("draft_quant_dtype", case, why, "name a Hugging Face directory of a small model")
    return ""


def _num_speculative_tokens(case: Case) -> str:
    config, number = case.config, case.config.num_speculative_tokens
    if not 1 <= number <= MAX_DEPTH:
        raise refuse("num_speculative_tokens", case, f"want 1 to {MAX_DEPTH}")
    if case.is_tree:
        return "tree_width and tree_depth say how many tokens a tree has"
    low, high = config.min_speculative_tokens, config.max_speculative_tokens
    if config.adaptive_depth and low <= high and not low <= number <= high:
        raise refuse("num_speculative_tokens", case, f"adaptive_depth keeps it between {low} and {high}")
    return ""


def _max_speculative_tokens(case: Case) -> str:
    low, high = case.config.min_speculative_tokens, case.config.max_speculative_tokens
    if high > MAX_DEPTH or high < max(1, low):
        raise refuse("max_speculative_tokens", case, f"want min_speculative_tokens, {low}, to {MAX_DEPTH}")
    return _of_adaptive(case)


def _min_speculative_tokens(case: Case) -> str:
    if case.config.min_speculative_tokens < 1:
        raise refuse("min_speculative_tokens", case, "want at least 1")
    return _of_adaptive(case)


def _target_acceptance_rate(case: Case) -> str:
    if not 0.0 <= case.config.target_acceptance_rate <= 1.0:
        raise refuse("target_acceptance_rate", case, "want a rate from 0 to 1")
    return _of_adaptive(case)


def _of_adaptive(case: Case) -> str:
    return _adaptive_depth(case) if case.config.adaptive_depth else "adaptive_depth is off"


def _adaptive_depth(case: Case) -> str:
    return "a tree's size is given" if case.config.adaptive_depth and case.is_tree else ""


def _tree_strategy(case: Case) -> str:
    if case.config.tree_strategy not in set(TreeStrategy):
        raise refuse("tree_strategy", case, f"want one of {', '.join(TreeStrategy)}")
    if case.is_tree and not case.source.has_trees:
        raise refuse("tree_strategy", case, f"{case.config.draft_strategy} drafts chains on the target's KV")
    return ""


def _of_tree(name: str, most: int) -> Callable[[Case], str]:
    def judge(case: Case) -> str:
        if not 1 <= getattr(case.config, name) <= most:
            raise refuse(name, case, f"want 1 to {most}")
        return "" if case.is_tree else f"tree_strategy is {case.config.tree_strategy}"

    return judge


def _share_kv_cache(case: Case) -> str:
    does_share, source = case.config.share_kv_cache, case.source
    if case.is_prefix:
        why = "the draft has its own copy of the layers: this target cannot leave layers out"
        return why if does_share and not source.is_on_target_kv else ""
    if source.is_on_target_kv:
        if not does_share:
            raise refuse("share_kv_cache", case, "early exit drafts on the target's KV", "use prefix_layers")
        return ""
    return "the draft has KV of its own" if source.has_own_kv else "the draft has no KV"


def _reuse_draft_kv(case: Case) -> str:
    if case.source.is_model:
        return ""
    return (
        "the verifier's drafts keep no KV between texts" if case.source.colocated else "the draft has no KV"
    )


def _kv_compression(case: Case) -> str:
    source = case.source
    if not case.config.kv_compression:
        return ""
    if source.is_on_target_kv:
        if not case.site.is_local and case.site.kv_dtype != "fp8":
            raise refuse(
                "kv_compression", case, "its KV is the target's", "start the verifier with --kv-dtype fp8"
            )
        return ""
    if not source.has_own_kv:
        return "the draft has no KV"
    if not source.is_model:
        raise refuse("kv_compression", case, f"the KV of {source.colocated} is in float32")
    if case.is_exported or case.is_prefix:
        why = "an exported draft keeps its KV in float32"
        raise refuse("kv_compression", case, why, "name a Hugging Face directory of a small model")
    return ""


def _always(name: str, why: str) -> Callable[[Case], str]:
    def judge(case: Case) -> str:
        if not getattr(case.config, name):
            raise refuse(name, case, why)
        return ""

    return judge


def _fuse_draft_verify(case: Case) -> str:
    config, is_fused = case.config, case.source.is_fused
    if config.fuse_draft_verify and not is_fused:
        why = f"{config.draft_strategy} drafts in a forward of its own; medusa and lookahead need none"
        raise refuse("fuse_draft_verify", case, why)
    if is_fused and not config.fuse_draft_verify:
        return f"{config.draft_strategy} always drafts from the forward that verifies"
    return ""


def _use_cuda_graph(case: Case) -> str:
    is_cuda = case.site.device.startswith("cuda")
    if case.config.use_cuda_graph and not is_cuda:
        raise refuse("use_cuda_graph", case, f"it needs CUDA, and the target runs on the {case.site.device}")
    return (
        "the verifier replays CUDA graphs wherever it can"
        if is_cuda and not case.config.use_cuda_graph
        else ""
    )


FIELDS: dict[str, Callable[[Case], str]] = {
    "draft_strategy": _honoured,  # refused by `find_source`
    "draft_model_path": _draft_model_path,
    "draft_num_layers": _draft_num_layers,
    "draft_quant_dtype": _draft_quant_dtype,
    "num_speculative_tokens": _num_speculative_tokens,
    "max_speculative_tokens": _max_speculative_tokens,
    "min_speculative_tokens": _min_speculative_tokens,
    "adaptive_depth": _adaptive_depth,
    "target_acceptance_rate": _target_acceptance_rate,
    "tree_strategy": _tree_strategy,
    "tree_width": _of_tree("tree_width", MAX_CONTINUATIONS),
    "tree_depth": _of_tree("tree_depth", MAX_TREE_DEPTH),
    "share_kv_cache": _share_kv_cache,
    "reuse_draft_kv": _reuse_draft_kv,
    "kv_compression": _kv_compression,
    "verify_in_parallel": _always("verify_in_parallel", "one forward verifies a whole draft"),
    "early_rejection": _always("early_rejection", "nothing after a rejected token is accepted"),
    "temperature": _honoured,  # refused by the client where it is out of range, as top_p
    "top_p": _honoured,
    "prefill_with_verify": _always("prefill_with_verify", "prompts and rounds share the target's forwards"),
    "fuse_draft_verify": _fuse_draft_verify,
    "use_cuda_graph": _use_cuda_graph,
    "log_acceptance_rate": _honoured,
    "log_speedup": _honoured,
}


def setup_values(config: SpeculativeConfig) -> dict[str, object]:
    """Returns the fields that say what is loaded, which a call cannot change."""
    return {name: getattr(config, name) for name in FIELDS if name not in OF_CALLS}


# A call of `decode_step` may change these; the others are of `setup`, which loads what they name.
OF_CALLS = frozenset(
    {
        "num_speculative_tokens",
        "max_speculative_tokens",
        "min_speculative_tokens",
        "adaptive_depth",
        "target_acceptance_rate",
        "tree_strategy",
        "tree_width",
        "tree_depth",
        "verify_in_parallel",
        "early_rejection",
        "temperature",
        "top_p",
        "prefill_with_verify",
        "fuse_draft_verify",
        "use_cuda_graph",
        "log_acceptance_rate",
        "log_speedup",
    }
)
