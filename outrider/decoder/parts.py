"""Makes what a configuration asks for: the draft's directory, heads, and the settings of both ends."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.cloud_verifier.config import ServeConfig
from outrider.common.process.extras import needs_extra
from outrider.common.types import EARLY_EXIT, LOOKAHEAD
from outrider.decoder.config import DraftStrategy, SpeculativeConfig, TreeStrategy
from outrider.decoder.sources import Site, Source, find_heads
from outrider.edge_client.config.draft_sections import MAX_NODES
from outrider.edge_client.config.run_config import RunConfig, default_draft_dir
from outrider.edge_client.drafting.backend import FP8, NF4, TORCH
from outrider.edge_client.drafting.spec import SPEC_FILE
from outrider.edge_client.library.settings import client_config

_WEIGHTS = {None: "auto", "int4": NF4, "fp8": FP8}


@dataclass(frozen=True, slots=True)
class DraftParts:
    """Says where the client's draft, or at least its tokenizer, is, and what computes it."""

    directory: Path
    settings: dict[str, object]


def make_draft(config: SpeculativeConfig, source: Source, site: Site, folder: Path) -> DraftParts:
    """Returns the client's draft. What has to be exported is written to `folder`, which takes seconds for a small model
    and minutes for a large one. Raises `ModelError` for a directory that cannot be used."""
    given = None if config.draft_model_path is None else Path(config.draft_model_path)
    if not source.is_model:
        tokenizer = site.target or given or default_draft_dir()
        return DraftParts(tokenizer, {"draft_strategy": source.strategy} if source.strategy else {})
    is_small = config.draft_strategy == DraftStrategy.SMALL_MODEL
    directory = given or (None if is_small else site.target) or default_draft_dir()
    is_prefix = config.draft_strategy == DraftStrategy.PREFIX_LAYERS
    dtype = config.draft_quant_dtype or (None if is_small else "int4")
    if (directory / SPEC_FILE).is_file() and not is_prefix:
        return DraftParts(directory, {})
    if is_prefix or (dtype == "int4" and not config.kv_compression):
        _export(directory, folder, config.draft_num_layers)
        return DraftParts(folder, {})
    kv = {"draft_kv_dtype": FP8} if config.kv_compression else {}
    threads = {"draft_threads": _num_torch_threads()} if site.is_local else {}
    return DraftParts(directory, {"draft_backend": TORCH, "draft_weights": _WEIGHTS[dtype], **kv, **threads})


def make_serve_config(config: SpeculativeConfig, source: Source, site: Site, folder: Path) -> ServeConfig:
    """Returns the options of a verifier in this process. Layers that draft on the target's KV are listed in a directory
    below `folder`."""
    assert site.target is not None, "the target is loaded here"
    serve = ServeConfig(target=site.target, draft="none", device=site.device)
    if config.kv_compression and source.is_on_target_kv:
        serve = replace(serve, kv_dtype=FP8)
    if source.colocated == LOOKAHEAD:
        return replace(serve, lookahead=True)
    if not source.colocated:
        return serve
    heads = None if config.draft_strategy == DraftStrategy.PREFIX_LAYERS else config.draft_model_path
    if heads is None and source.is_on_target_kv:
        heads = _write_first_layers(config.draft_num_layers or 1, folder)
    return replace(serve, heads=(str(heads or find_heads(source.colocated, site.target)),))


def make_client_config(
    config: SpeculativeConfig, source: Source, site: Site, draft: DraftParts, address: str
) -> RunConfig:
    """Returns the client's settings but for those of single calls. Raises `ConfigError`."""
    settings = dict(draft.settings)
    if source.colocated:
        settings |= {"mode": "co-located", "draft_source": source.colocated}
    else:
        settings |= {"mode": "speculative"}
    # The text is the target's, whatever the environment says of other clients.
    settings["on_timeout"] = "wait"
    if site.is_local:
        settings["pipeline"] = "off"  # an answer is there as soon as it is waited for
    made, _ = client_config(address, draft.directory, settings)
    return made if config.reuse_draft_kv else replace(made, serve=replace(made.serve, draft_cache_mb=0.0))


def call_settings(config: SpeculativeConfig, depth: int) -> dict[str, object]:
    """Returns the settings of one call, which drafts chains of `depth` or trees."""
    sampling: dict[str, object] = {"temperature": config.temperature, "top_p": config.top_p}
    if config.tree_strategy != TreeStrategy.TREE:
        return {**sampling, "num_speculative_tokens": depth}
    width, longest = config.tree_width, config.tree_depth
    return {**sampling, "tree": num_nodes(width, longest), "tree_width": width, "tree_depth": longest}


def num_nodes(width: int, depth: int) -> int:
    """Returns how many nodes a full tree has, as far as there may be so many."""
    total = 0
    for level in range(1, depth + 1):
        total += width**level
        if total >= MAX_NODES:
            return MAX_NODES
    return total


def _export(directory: Path, folder: Path, num_layers: int | None) -> None:
    with needs_extra("export", "SpeculativeDecoder with a draft in INT4"):
        from outrider.edge_client.drafting.export.exporter import export_draft
    export_draft(directory, folder, first_layers=num_layers)


def _write_first_layers(num_layers: int, folder: Path) -> Path:
    """Writes the directory of an early exit (docs/heads.md)."""
    path = folder / EARLY_EXIT
    path.mkdir(parents=True, exist_ok=True)
    ours = {"kind": EARLY_EXIT, "layers": list(range(num_layers))}
    (path / "config.json").write_text(json.dumps({"outrider": ours}), encoding="utf-8")
    return path


def _num_torch_threads() -> int:
    """Returns how many threads the target computes with: the draft sets them for the whole process."""
    import torch

    return torch.get_num_threads()
