"""One text in virtual time with every way of working: synchronous, pipelined, streamed, or chosen on the way.

The edge's own classes decide (depth policy, window, mode choice); drafting, trips and forwards take what
the point says. The edge drafts token by token and looks between two whether an answer has come; the verifier
takes a session's rounds one after the other, and answers stale ones at once. Deterministic.

Which tokens stand is told by an acceptance trace: a draft that began behind token p of the text is right for
`runs[p]` tokens. Under `coupled` a draft that goes on over round borders is one such draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.costmodel import LinkCosts, ModelCosts
from edge_client.depth.base import DepthPolicy
from edge_client.drafting.base import Stop
from edge_client.mode_choice import ModeChoice, Way
from edge_client.pipeline import RoundWindow
from edge_client.stats import RoundRecord
from experiments.acceptance_traces import MAX_DEPTH, TextTrace, signals_of

LinkNow = Callable[[float], LinkCosts]  # by the time since the text began
_NUM_PROMPT_TOKENS = 64  # of a prompt, in the opening's forward
_ANY_TOKEN = 0  # depth policies ask for confidences alone
EAGER_TOKENS = 32  # of a stream: each is drafted beside it
LOOK_EVERY, TRIP_EVERY_S = 4, 1.0  # while streaming: tokens to a drafted one, and between two timed trips


@dataclass(slots=True)
class _Sent:
    first: int  # of its draft, as an index into the text
    length: int
    num_right: int  # of its tokens, all before it standing
    draft_s: float
    sent_s: float
    window: int
    is_ahead: bool
    start_s: float = 0.0
    verified_s: float = 0.0
    arrives_s: float = 0.0


@dataclass(slots=True)
class VirtualText:
    """Decodes `trace`; `token_times_s` counts from the first token, which the opening brought."""

    trace: TextTrace
    models: ModelCosts
    link: LinkNow
    depth: DepthPolicy
    window: RoundWindow
    now_s: float = 0.0
    position: int = 0  # new tokens so far, but for the first
    verifier_free_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    records: list[RoundRecord] = field(default_factory=list)
    num_stale_rounds: int = 0
    num_wasted_tokens: int = 0
    seconds_by_way: dict[Way, float] = field(default_factory=dict)
    _flight: deque[_Sent] = field(default_factory=deque)
    _anchor: int = 0  # where what is known of the draft under way begins
    _run_end: int = 0  # up to where the draft under way is right

    def run(self) -> VirtualText:
        choice = self.window.choice
        if choice is not None:
            link = self.link(0.0)
            models = self.models
            prompt_s = models.verify_s(_NUM_PROMPT_TOKENS - 1)
            step_s = (models.verify_s(-1), models.verify_token_s)  # of a verifier that served before
            choice.observe_opening(link.rtt_s, prompt_s, models.draft_token_s, *step_s)
        self._choose()
        while self.position < self.trace.num_positions:
            before_s, way = self.now_s, choice.current if choice is not None else Way.SYNCHRONOUS
            if way is Way.CLOUD_ONLY and not self._flight:
                self._stream(choice)
            elif not self._flight or self._may_draft_on():
                self._draft_round()
            else:
                self._take_verdict()
                self._choose()
            self.seconds_by_way[way] = self.seconds_by_way.get(way, 0.0) + self.now_s - before_s
        return self

    @property
    def tpot_s(self) -> float:
        return self.token_times_s[-1] / len(self.token_times_s)

    def _choose(self) -> None:
        self.window.choose(self.trace.num_positions - self.position)

    # --------------------------------------------------------------------------------------- rounds

    def _may_draft_on(self) -> bool:
        choice = self.window.choice
        is_leaving = choice is not None and choice.current is Way.CLOUD_ONLY
        if is_leaving or len(self._flight) >= self.window.size or self._flight[0].arrives_s <= self.now_s:
            return False
        return self._end_of_flight() < self.trace.num_positions - 1

    def _end_of_flight(self) -> int:
        return self._flight[-1].first + self._flight[-1].length if self._flight else self.position

    def _num_right(self, first: int, length: int) -> int:
        """How many tokens of a draft from `first` on are right; it goes on with what is under way."""
        runs, num_positions = self.trace.runs, self.trace.num_positions
        if not self._flight:
            self._anchor, self._run_end = self.position, self.position + int(runs[self.position])
        while self._run_end == self._anchor + MAX_DEPTH < min(first + length, num_positions):
            self._anchor, self._run_end = self._run_end, self._run_end + int(runs[self._run_end])
        return min(max(0, self._run_end - first), length)

    def _draft_round(self) -> None:
        first, is_ahead = self._end_of_flight(), bool(self._flight)
        most = min(self.depth.next_depth(), self.trace.num_positions - first - 1, MAX_DEPTH)
        should_stop = self.depth.stop_rule()
        confidences = self.trace.confidences[min(first, self.trace.num_positions - 1)].tolist()
        start_s, length = self.now_s, 0
        while length < most:
            length += 1
            self.now_s += self.models.draft_token_s
            if is_ahead and self._has_bad_news():
                self.num_wasted_tokens += length
                return
            if should_stop is not None:
                signals = signals_of(confidences[length - 1]) if confidences else None
                if should_stop(_ANY_TOKEN, signals, length) is not Stop.NO:
                    break
        right = self._num_right(first, length)
        sent = _Sent(first, length, right, self.now_s - start_s, self.now_s, self.window.size, is_ahead)
        self._send(sent)
        self._flight.append(sent)

    def _send(self, sent: _Sent) -> None:
        link = self.link(self.now_s)
        arrival_s = self.now_s + (link.rtt_s + link.transfer_s(sent.length)) / 2
        sent.start_s = max(arrival_s, self.verifier_free_s)
        # What a bonus confirmed is not fed again.
        fed = sent.length - (1 if sent.is_ahead else 0)
        sent.verified_s = sent.start_s + self.models.verify_s(fed)
        sent.arrives_s = sent.verified_s + (link.rtt_s + link.transfer_s(sent.length)) / 2
        if not any(each.num_right < each.length for each in self._flight) and not (
            sent.is_ahead and not sent.num_right
        ):
            self.verifier_free_s = sent.verified_s  # stale rounds take nobody's time

    def _has_bad_news(self) -> bool:
        return any(s.arrives_s <= self.now_s and self._falls(i) for i, s in enumerate(self._flight))

    def _falls(self, index: int) -> bool:
        """Whether the verdict of this round under way says that what follows it is useless."""
        sent = self._flight[index]
        if sent.num_right < sent.length:
            return True
        behind = self._flight[index + 1] if index + 1 < len(self._flight) else None
        return behind is not None and behind.num_right == 0

    def _take_verdict(self) -> None:
        falls = self._falls(0)
        sent = self._flight.popleft()
        self.now_s = max(self.now_s, sent.arrives_s)
        link = self.link(self.now_s)
        num_new = sent.first + sent.num_right + 1 - self.position
        self._commit(num_new)
        confidences = self.trace.confidences[min(sent.first, self.trace.num_positions - 1)].tolist()
        net_s = link.rtt_s + link.transfer_s(sent.length)
        self._record(
            RoundRecord(
                round_id=len(self.records) + 1,
                num_draft_tokens=sent.length,
                num_accepted_tokens=sent.num_right,
                draft_ms=1e3 * sent.draft_s,
                rtt_ms=1e3 * (self.now_s - sent.sent_s),
                net_ms=1e3 * net_s,
                queue_ms=1e3 * max(0.0, sent.start_s - sent.sent_s - net_s / 2),
                forward_ms=1e3 * (sent.verified_s - sent.start_s),
                verifier_ms=1e3 * max(0.0, sent.verified_s - sent.sent_s - net_s / 2),
                batch_size=1,
                confidences=tuple(confidences[: sent.length]),
                window=sent.window,
                pipelined_hit=True if sent.is_ahead else None,
            )
        )
        if falls:
            for number, each in enumerate(self._flight):
                self.num_stale_rounds += 1
                self.num_wasted_tokens += each.length
                is_first_wrong = number == 0 and sent.num_right == sent.length
                self._record(
                    RoundRecord(
                        len(self.records) + 1,
                        each.length,
                        is_answered=False,
                        window=each.window,
                        pipelined_hit=False,
                        is_first_wrong=is_first_wrong,
                    )
                )
            self._flight.clear()

    def _commit(self, num_new: int) -> None:
        num_new = min(num_new, self.trace.num_positions - self.position)
        self.token_times_s += [self.now_s] * num_new
        self.position += num_new

    def _record(self, record: RoundRecord) -> None:
        self.records.append(record)
        self.depth.observe(record)
        self.window.observe(record)

    # --------------------------------------------------------------------------------------- stream

    def _stream(self, choice: ModeChoice | None) -> None:
        """Until another way is chosen; the tokens that are on their way then still come."""
        assert choice is not None
        token_s = self.models.target_token_s
        self.now_s += self.link(self.now_s).rtt_s
        number = 0
        last_trip_s = self.now_s
        while self.position < self.trace.num_positions and choice.current is Way.CLOUD_ONLY:
            self.now_s += token_s
            if number < EAGER_TOKENS or number % LOOK_EVERY == 1:
                choice.observe_shadow(int(self.trace.runs[self.position]) > 0, self.models.draft_token_s)
            self._commit(1)
            number += 1
            if number % LOOK_EVERY:
                continue
            choice.observe_stream(token_s)
            if self.now_s - last_trip_s > TRIP_EVERY_S:
                choice.observe_trip(self.link(self.now_s).rtt_s)
                last_trip_s = self.now_s
            self._choose()
        if choice.current is not Way.CLOUD_ONLY:
            rtt_s = self.link(self.now_s).rtt_s
            for _ in range(min(int(rtt_s / token_s), self.trace.num_positions - self.position)):
                self.now_s += token_s
                self._commit(1)
            self.now_s += rtt_s - token_s * int(rtt_s / token_s)
