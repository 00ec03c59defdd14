"""Makes the bounds of drafted trees from `--tree`, `--tree-width`, `--tree-depth` and `--tree-shape`."""

from __future__ import annotations

from typing import Literal

from outrider.common.errors import UsageError
from outrider.common.methods import drafts_trees, sends_support
from outrider.common.types import Method
from outrider.edge_client.config.gate import judges_variance
from outrider.edge_client.config.methods import draft_source
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.core.options import ExecutionMode, Pipelining
from outrider.edge_client.drafting.registry import MODEL, WITHOUT_MODEL
from outrider.edge_client.drafting.tree_shape import read_tree_shape
from outrider.edge_client.drafting.trees import (
    DEFAULT_DEPTH,
    DEFAULT_NODES,
    DEFAULT_WIDTH,
    MAX_CONTINUATIONS,
    TreeBudget,
)
from outrider.edge_client.gate.gate import GateUse

HEAD_NODES = 16  # of a tree that a head at the verifier drafts


def tree_budget(config: RunConfig) -> TreeBudget | None:
    """Returns the bounds of a round's tree; None without `--tree`. Raises `UsageError` for flags that do not go with
    it, `ConfigError` for a file of a shape that cannot be used."""
    tree = config.tree
    if tree.shape is not None and (why := why_no_shape(config)):
        raise UsageError(f"--tree-shape {tree.shape} {why}")
    use = tree_use(config)
    if use == "off":
        for flag, value in (("--tree-width", tree.width), ("--tree-depth", tree.depth)):
            if value is not None:
                raise UsageError(f"{flag} {value} goes with --tree auto or --tree N")
        return None
    if why := why_no_tree(config):
        raise UsageError(f"--tree {use} {why}")
    num_nodes = use if isinstance(use, int) else DEFAULT_NODES
    if tree.shape is not None:
        shape = read_tree_shape(tree.shape)[:num_nodes]
        return TreeBudget(num_nodes, max(map(len, shape)), MAX_CONTINUATIONS, shape=shape)
    copied = 0 if tree.depth or config.draft.strategy == MODEL else num_nodes
    width = tree.width or DEFAULT_WIDTH
    return TreeBudget(num_nodes, tree.depth or DEFAULT_DEPTH, width, max_copied_depth=copied)


def tree_use(config: RunConfig) -> Literal["auto", "off"] | int:
    """Returns `--tree`, or its default: auto where nothing else says what a round drafts, trees from a head at the
    verifier."""
    if config.tree.use is not None:
        return config.tree.use
    is_by_head = bool(draft_source(config)) and config.depth.num_speculative_tokens is None
    if is_by_head and drafts_trees(config.verification.method):
        return HEAD_NODES
    is_free = config.depth_policy == "optimal" and config.depth.num_speculative_tokens is None
    is_usual = config.draft.strategy not in WITHOUT_MODEL and config.gate.use is GateUse.OFF
    may_alternate = config.pipelining.use is not Pipelining.ON
    return "auto" if is_free and is_usual and may_alternate and not why_no_tree(config) else "off"


def why_no_shape(config: RunConfig) -> str:
    """Returns why `--tree-shape` is refused; empty where it can be used. Raises `ConfigError` for its file."""
    tree = config.tree
    assert tree.shape is not None
    if not isinstance(tree.use, int):
        return f"goes with --tree N, not with --tree {tree_use(config)}"
    if sends_support(method := config.verification.method):
        return f"does not go with --method {method}, whose trees grow by what was drawn"
    if config.mode is ExecutionMode.CO_LOCATED:
        return "goes with --mode speculative or auto: the verifier drafts co-located trees"
    for flag, value in (("--tree-width", tree.width), ("--tree-depth", tree.depth)):
        if value is not None:
            return f"has a width and depth of its own: leave {flag} {value} out"
    if tree.use > (num_nodes := len(read_tree_shape(tree.shape))):
        return f"has {num_nodes} nodes: --tree {tree.use} is more"
    return ""


def why_no_tree(config: RunConfig) -> str:
    """Returns why `--tree`, or auto where it is not given, is refused; empty where it can be used."""
    method = config.verification.method
    is_auto = config.tree.use == "auto" or (config.tree.use is None and not draft_source(config))
    if not is_auto and (length := config.depth.num_speculative_tokens) is not None:
        return f"takes the place of --num-speculative-tokens {length}: give one of them"
    goes_with = (
        ""
        if drafts_trees(method)
        else f"goes with --method coupled, sparse or typical, not with --method {method}"
    )
    if config.mode is ExecutionMode.CO_LOCATED and not is_auto:
        return goes_with
    if not config.mode.has_rounds:
        return f"goes with --mode speculative or auto: in mode {config.mode} the edge sends no rounds"
    if is_auto and method not in (Method.COUPLED, Method.SPARSE):
        return f"goes with --method coupled or sparse, not with --method {method}"
    if goes_with:
        return goes_with
    if config.gate.use is GateUse.COMMIT:
        return "does not go with --gate commit, which keeps chains"
    if config.gate.use is GateUse.STOP and sends_support(method):
        return f"does not go with --gate stop and --method {method}: tokens of its trees have no signals"
    if config.gate.use is GateUse.STOP and judges_variance(config):
        return "does not go with a threshold of variance: a draft's runs for trees measure none"
    return ""
