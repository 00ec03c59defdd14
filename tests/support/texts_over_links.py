"""Decodes texts over links that misbehave, by every policy and mode, and compares them with cloud-only's.

The embedded pair over real gRPC, a verifier in a process of its own, `--on-timeout wait`: every depth policy
with rounds one at a time, pipelined, pipelined where it pays, and with the mode chosen on the way, on streams
and (where rounds need not keep their order) in single calls. The links lose packets, let them overtake one
another, hold them back, go dark for a while, or break their connections mid-text. Each text is compared with
the one that the target streams over loopback.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.controller.plan_check_runs import decoding
from outrider.common.errors import OutriderError
from outrider.common.types import SamplingParams, TokenIds
from outrider.edge_client.controller.depth.registry import DEPTH_POLICIES, create_depth_policy
from outrider.edge_client.controller.window import create_window
from outrider.edge_client.core.events import SessionEvent, TokenEvent
from outrider.edge_client.core.options import ExecutionMode, Pipelining
from outrider.edge_client.session.session import SessionResult
from outrider.experiments.links.base import LinkRealisation, OpenLink
from outrider.experiments.links.profile import LinkProfile, Outage
from outrider.experiments.shared.decoding import Case, Decoder, HungError
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.sweep.results.texts import first_difference
from outrider.models import EMBEDDED

HANGS_S = 90.0
MIN_FORWARD_MS = 10.0  # so that rounds, pipelined or not, and the stream each win somewhere
TEMPERATURES = (0.8, 0.0)


@dataclass(frozen=True, slots=True)
class BadLink:
    """Describes a link. `resets`: at which new tokens of a text its connection is broken."""

    profile: LinkProfile
    resets: tuple[int, ...] = ()


LINKS = (
    BadLink(LinkProfile("steady", rtt_ms=20)),
    BadLink(
        LinkProfile(
            "lossy",
            rtt_ms=20,
            jitter_ms=5,
            jitter_distribution="pareto",
            loss=0.03,
            loss_burst=2,
        )
    ),
    BadLink(LinkProfile("reordering", rtt_ms=20, jitter_ms=2, reorder=0.2)),
    BadLink(LinkProfile("outages", rtt_ms=20, outages=(Outage(0.2, 0.6), Outage(1.2, 0.6)))),
    BadLink(LinkProfile("resets", rtt_ms=20), resets=(7, 23)),
)


@dataclass(frozen=True, slots=True)
class _Handling:
    """Says how rounds are sent, or in mode auto how the whole text is made."""

    pipelining: Pipelining
    is_auto: bool = False
    transport: str = "stream"

    def __str__(self) -> str:
        way = "auto" if self.is_auto else f"pipeline {self.pipelining}"
        return way if self.transport == "stream" else f"{way}, {self.transport}"


HANDLINGS = (
    *map(_Handling, Pipelining),
    _Handling(Pipelining.AUTO, is_auto=True),
    _Handling(Pipelining.OFF, transport="unary"),  # single calls keep no order: one round at a time
    _Handling(Pipelining.OFF, is_auto=True, transport="unary"),
)


@dataclass(frozen=True, slots=True)
class Text:
    """Holds a text of cloud-only."""

    prompt: str
    temperature: float
    seed: int
    token_ids: TokenIds  # cloud-only's


@dataclass(slots=True)
class Found:
    """Holds what was found over one link."""

    num_texts: int = 0
    num_tokens: int = 0
    num_ties: int = 0
    wrong: list[str] = field(default_factory=list)  # differed, failed or hung
    happened: Counter[str] = field(default_factory=Counter)

    def count(self, result: SessionResult) -> None:
        """Adds a session."""
        stats = result.stats
        self.num_tokens += len(result.token_ids)
        self.happened += Counter(
            rounds=sum(each.is_answered for each in stats.rounds),
            judged_ahead=sum(each.pipelined_hit is True for each in stats.rounds),
            stale=stats.num_stale_rounds,
            streamed_tokens=stats.num_generate_tokens,
            reconnects=stats.num_reconnects,
            refusals=stats.num_refusals,
            rebuilds=stats.num_rebuilds,
        )


def texts_over_links(
    realisation: LinkRealisation,
    links: Sequence[BadLink],
    policies: Sequence[str] = DEPTH_POLICIES,
    num_prompts: int = 1,
    num_new: int = 32,
) -> dict[str, tuple[Found, dict[str, Any]]]:
    """Returns by link what was found, and the link's facts. Links run beside each other."""
    with decoding(None, MIN_FORWARD_MS, 0.0) as (address, decoder_at):
        texts = list(_cloud_only_texts(decoder_at(address), num_prompts, num_new))

        def run(bad: BadLink) -> tuple[Found, dict[str, Any]]:
            with realisation.open(bad.profile, address) as link:
                return compare_texts(link, bad, decoder_at(link.address), texts, policies), link.facts()

        with ThreadPoolExecutor(len(links)) as pool:
            return dict(zip((bad.profile.name for bad in links), pool.map(run, links), strict=True))


def _cloud_only_texts(decoder: Decoder, num_prompts: int, num_new: int) -> Iterator[Text]:
    prompts = load_prompts(limit=num_prompts)
    for (seed, prompt), temperature in itertools.product(enumerate(prompts, start=1), TEMPERATURES):
        result = decoder.decode(prompt.text, Case(ExecutionMode.CLOUD_ONLY, temperature), num_new, seed)
        yield Text(prompt.text, temperature, seed, result.token_ids)


def compare_texts(
    link: OpenLink, bad: BadLink, decoder: Decoder, texts: Sequence[Text], policies: Sequence[str]
) -> Found:
    """Decodes one text after the other over `link`, whose outages begin anew with each."""
    found = Found()
    for text, policy, handling in itertools.product(texts, policies, HANDLINGS):
        what = f"{bad.profile.name}, {policy}, {handling}, T={text.temperature:g}, seed {text.seed}"
        link.restart_outages()
        found.num_texts += 1
        try:
            result = _decode(decoder, link, bad, text, policy, handling)
        except (OutriderError, HungError) as error:
            found.wrong.append(f"{what}: {error}")
            continue
        found.count(result)
        at = first_difference(result.token_ids, text.token_ids)
        if at is None:
            continue
        if _is_tie(decoder, text, result.token_ids, at):
            found.num_ties += 1
        else:
            found.wrong.append(f"{what}: differs from token {at} on")
    print(f"{bad.profile.name}: {found.num_texts} texts, {len(found.wrong)} wrong", flush=True)
    return found


def _decode(
    decoder: Decoder, link: OpenLink, bad: BadLink, text: Text, policy: str, handling: _Handling
) -> SessionResult:
    def break_off(event: SessionEvent) -> None:
        if isinstance(event, TokenEvent) and event.index in bad.resets:
            link.reset()

    mode = ExecutionMode.AUTO if handling.is_auto else ExecutionMode.SPECULATIVE
    return decoder.decode(
        text.prompt,
        Case(mode, text.temperature),
        len(text.token_ids),
        text.seed,
        policy=create_depth_policy(policy),
        window=create_window(handling.pipelining, None, policy, has_stream_too=handling.is_auto),
        transport=handling.transport,
        deadline_s=None,
        hangs_s=HANGS_S,
        on_event=break_off,
    )


def _is_tie(decoder: Decoder, text: Text, written: Sequence[int], at: int) -> bool:
    """Asks the target, loaded into this process."""
    from outrider.experiments.sweep.results.judging import Scorer

    if at >= min(len(written), len(text.token_ids)):
        return False
    sampling = SamplingParams(temperature=text.temperature, seed=text.seed)
    scorer, prompt_ids = Scorer(EMBEDDED / "target"), decoder.tokenizer.encode(text.prompt)
    return scorer.is_tie(prompt_ids, written[:at], written[at], text.token_ids[at], sampling)
