"""Measures the parts of a plan over the live link: drafting, verifying and streaming for a few seconds.

Sessions of several draft lengths run one after the other until the time is up, with cloud-only streams between them,
and co-located ones of each draft source that the verifier lists beside a draft model. The first round of a session
is not counted: the draft's and the verifier's caches are cold then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle, pairwise

from outrider.common.config.loader import with_values
from outrider.common.errors import UsageError
from outrider.common.methods import sends_support
from outrider.common.types import DRAFT_SOURCE, LOOKAHEAD, Method, ModelInfo
from outrider.edge_client.config.grammar import make_grammar
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.config.tree import why_no_tree
from outrider.edge_client.controller.settings import MAX_DEPTH
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.planning.samples import (
    AcceptanceSequence,
    Known,
    SourceRounds,
    acceptance_by_position,
    cost_line,
    known,
    replay_rounds,
    sequences_of,
    source_rounds,
    streamed_rounds,
)
from outrider.edge_client.session.factory import Edge

LENGTHS = (8, 1, 4, 0, 12, 2)  # 0: a verification without any draft
NODES = (16, 64)  # of trees, where method and draft have them
FIRST_TOKENS, LATER_TOKENS = 24, 64  # of a session: a quick first turn, then fewer openings
MIN_PATIENCE_S = 2.0  # to wait for a link that does not answer
MIN_ROUNDS, MIN_STREAMED, MIN_JUDGED = 6, 8, 8
PROMPTS = (
    "def read_lines(path):\n",
    "import json\n\n\nclass Store:\n    def __init__(self, path):\n",
    "Once upon a time there was a",
)

Prompt = str | Sequence[int]  # text, or token ids
Errand = tuple[RunConfig, Prompt, int]  # a session to run: configuration, prompt, seed


@dataclass(slots=True)
class Samples:
    """Holds what was measured. `token_gaps_s` are the times between two tokens of a stream, without the
    first; `sessions` are all of their rounds' (accepted, drafted). Rounds that were trees are apart, and those of
    draft sources at the verifier, (seconds, tokens) by name."""

    rounds: list[RoundRecord] = field(default_factory=list)
    trees: list[RoundRecord] = field(default_factory=list)
    sessions: list[list[tuple[int, int]]] = field(default_factory=list)
    token_gaps_s: list[float] = field(default_factory=list)
    source_rounds: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    model: ModelInfo | None = None
    method: Method = Method.COUPLED  # that the drafts were judged by


@dataclass(frozen=True, slots=True)
class MeasuredParts:
    """Holds the measured parts of a `outrider.edge_client.planning.plan.PlanParts`."""

    draft_token: Known
    draft_fixed: Known
    target_token: Known
    verify_fixed: Known
    verify_token: Known
    rtt: Known
    acceptance: tuple[Known, ...]
    sequences: tuple[AcceptanceSequence, ...]
    tree_base: Known | None  # None: no tree was drafted
    tree_node: Known | None
    sources: tuple[SourceRounds, ...]  # those with enough rounds
    lacks_draft: bool  # the verifier has such sources and no draft
    method: Method


def measure(
    edge: Edge,
    *,
    prompts: Sequence[Prompt] = PROMPTS,
    seconds: float,
    on_progress: Callable[[float, int], None] = lambda share, num_rounds: None,
    clock: Callable[[], float] = time.monotonic,
) -> Samples:
    """Returns what sessions of `seconds` measured. Raises `LinkError` and what else a session raises."""
    samples, end_s = Samples(method=edge.config.verification.method), clock() + seconds
    begin_s = end_s - seconds

    def is_over() -> bool:
        on_progress(min(1.0, (clock() - begin_s) / seconds), len(samples.rounds))
        return clock() >= end_s

    for errand in errands(edge.config, prompts, seconds, samples):
        run_errand(edge, errand, samples, is_over)
        if clock() >= end_s:
            return samples
    raise AssertionError("errands never end")


def run_errand(
    edge: Edge, errand: Errand, samples: Samples, is_over: Callable[[], bool] = lambda: False
) -> None:
    """Runs one session and adds what it measured; asks after each token whether to end it."""
    config, prompt, seed = errand
    session = edge.session(prompt, seed, config)
    for _ in session.generate():
        if is_over():
            session.cancel()
    stats = session.result.stats
    samples.model = session.result.model or samples.model
    answered = [each for each in stats.rounds[1:] if each.is_answered]
    if config.mode is ExecutionMode.CO_LOCATED:
        rounds = samples.source_rounds.setdefault(config.draft_source, [])
        rounds += streamed_rounds(stats.token_times_ns)
    elif config.tree.use != "off":
        samples.trees += [each for each in answered if each.main_path is not None]
    else:
        samples.rounds += answered
        if stats.rounds and all(each.is_answered for each in stats.rounds):
            samples.sessions.append(
                [(each.num_accepted_tokens, _num_judged(edge, config, each)) for each in stats.rounds]
            )
    if config.mode is ExecutionMode.CLOUD_ONLY:
        times_ns = stats.token_times_ns[1:]
        samples.token_gaps_s += [(after - before) / 1e9 for before, after in pairwise(times_ns)]


def _num_judged(edge: Edge, config: RunConfig, round_: RoundRecord) -> int:
    """Returns the drafted tokens of a round. A copy of earlier text ends where there is nothing to copy, mostly before
    its first token; what it lacks counts as rejected."""
    asked = config.depth.num_speculative_tokens
    if asked is None or edge.draft is None or edge.draft.signal_names:
        return round_.num_draft_tokens
    return max(asked, round_.num_draft_tokens)


def errands(
    config: RunConfig,
    prompts: Sequence[Prompt],
    seconds: float,
    samples: Samples,
    *,
    has_sources: bool = True,
) -> Iterator[Errand]:
    """Yields the sessions to run, without end. A slow round is waited for and measured. Which draft sources there are
    is known after the first one; `has_sources` says whether they are measured too."""
    is_free = make_grammar(config.grammar) is None  # a constrained text ends where its grammar does
    own_prompts, seeds = cycle(prompts), count(1 if config.seed is None else config.seed)
    for turn in count():
        num_tokens = FIRST_TOKENS if turn == 0 else LATER_TOKENS
        common = with_values(
            config,
            on_timeout="wait",
            recover_timeout_s=min(config.outage.recover_timeout_s, max(seconds, MIN_PATIENCE_S)),
            ignore_eos=is_free,
            max_new_tokens=num_tokens,
            depth_policy="fixed",
            tree="off",
        )
        speculative = with_values(common, mode=ExecutionMode.SPECULATIVE, pipeline="off")
        prompt = next(own_prompts)
        for number, length in enumerate(LENGTHS):
            yield with_values(speculative, num_speculative_tokens=length), prompt, next(seeds)
            if number % 3 == 0:
                yield replace(common, mode=ExecutionMode.CLOUD_ONLY), prompt, next(seeds)
            if number == 2:
                for source in _sources(samples.model, config) if has_sources else ():
                    yield _co_located(common, source), prompt, next(seeds)
        trees = [with_values(speculative, tree=nodes) for nodes in NODES]
        for config_of_trees in trees if not why_no_tree(trees[0]) else ():
            yield config_of_trees, prompt, next(seeds)


def _sources(model: ModelInfo | None, config: RunConfig) -> list[str]:
    """Returns what drafts at the verifier beside a draft model, and goes with the method."""
    unusable = [DRAFT_SOURCE, *([LOOKAHEAD] if sends_support(config.verification.method) else [])]
    return [name for name in (model.draft_sources if model else ()) if name not in unusable]


def _co_located(common: RunConfig, source: str) -> RunConfig:
    """Returns the session of `--mode co-located --draft-source NAME`, which drafts the trees of its default. It is as
    long in the first turn: rounds of several tokens are fewer."""
    return with_values(
        common,
        mode=ExecutionMode.CO_LOCATED,
        draft_source=source,
        tree=None,
        num_speculative_tokens=None,
        support_size=None,
        max_new_tokens=LATER_TOKENS,
    )


def parts_from(samples: Samples, flag: str = "--measure-s") -> MeasuredParts:
    """Returns the parts; raises `UsageError` naming `flag` where too little was measured."""
    rounds = samples.rounds
    drafted = [each for each in rounds if each.num_draft_tokens]
    judged = sum(min(each.num_accepted_tokens + 1, each.num_draft_tokens) for each in drafted)
    found = f"{len(rounds)} rounds, {judged} judged tokens, {len(samples.token_gaps_s)} streamed ones"
    if len(rounds) < MIN_ROUNDS or judged < MIN_JUDGED or len(samples.token_gaps_s) < MIN_STREAMED:
        raise UsageError(f"too little was measured ({found}): give {flag} more")
    verify_fixed, verify_token = cost_line(
        [(r.num_draft_tokens, r.verifier_ms / 1e3) for r in rounds], is_flat=True
    )
    draft_fixed, draft_token = cost_line(
        [(r.num_draft_tokens, r.draft_ms / 1e3) for r in drafted], is_flat=False
    )
    sequences = sequences_of(samples.sessions)
    tree_base = tree_node = None
    if samples.trees:
        times = [(each.num_draft_tokens, each.draft_ms / 1e3) for each in samples.trees]
        tree_base, tree_node = cost_line(times, is_flat=False)
    found_sources = tuple(
        source_rounds(name, each) for name, each in samples.source_rounds.items() if len(each) >= MIN_ROUNDS
    )
    has_draft = samples.model is None or DRAFT_SOURCE in samples.model.draft_sources
    return MeasuredParts(
        draft_token=draft_token,
        draft_fixed=draft_fixed,
        target_token=known(samples.token_gaps_s),
        verify_fixed=verify_fixed,
        verify_token=verify_token,
        rtt=known([each.net_ms / 1e3 for each in rounds]),
        acceptance=acceptance_by_position(replay_rounds(sequences, MAX_DEPTH)),
        sequences=sequences,
        tree_base=tree_base,
        tree_node=tree_node,
        sources=found_sources,
        lacks_draft=bool(found_sources) and not has_draft,
        method=samples.method,
    )


def rarely_measured(samples: Samples, config: RunConfig, flag: str = "--measure-s") -> list[str]:
    """Returns a line for each draft source at the verifier that had too few rounds for a part of the plan."""
    counts = {name: len(samples.source_rounds.get(name, ())) for name in _sources(samples.model, config)}
    return [
        f"co-located, {name}: too little was measured ({count} rounds): give {flag} more"
        for name, count in counts.items()
        if count < MIN_ROUNDS
    ]
