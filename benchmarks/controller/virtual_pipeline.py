"""One text in virtual time with every way of working: synchronous, pipelined, streamed, or chosen on the way.

The edge's own classes decide (depth policy, window, guesses, mode choice); drafting, trips and forwards take
what the point says. The edge drafts token by token and looks between two whether an answer has come; the
verifier takes a session's rounds one after the other, and answers stale ones at once. Deterministic.

Where guesses are made a message's handling costs what it does, on either side, and so does the reading again
of tokens after a change of branch; without them nothing of that is charged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.controller.virtual_flight import RIGHT, Sent, Truth, is_right, path_of, start_of
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.controller.mode_policy import ModeChoice, Way
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.decode.branch_tree import Branch, Branches, GuessRates
from outrider.edge_client.decode.branching import LEAST_CHANCE
from outrider.edge_client.drafting.base import Stop
from outrider.experiments.shared.acceptance_traces import MAX_DEPTH, TextTrace, signals_of

LinkNow = Callable[[float], LinkCosts]  # by the time since the text began
_NUM_PROMPT_TOKENS = 64  # of a prompt, in the opening's forward
SEND_S, STALE_S = 0.0002, 0.0001  # of a message at the edge; of a stale round at the verifier
REFEED_SHARE = 0.12  # of a drafted token's time, each token that is read again
_ANY_TOKEN = 0  # depth policies ask for confidences alone
LOOK_EVERY, TRIP_EVERY_S = 4, 1.0  # while streaming: tokens to a look, and between two timed trips


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
    num_guessed_rounds: int = 0
    num_guess_hits: int = 0
    num_wasted_tokens: int = 0
    seconds_by_way: dict[Way, float] = field(default_factory=dict)
    rates: GuessRates = field(default_factory=GuessRates)
    _truth: Truth = field(init=False)
    _branches: Branches[Sent] = field(init=False)
    _flight: list[Sent] = field(default_factory=list)
    _fed: list[object] = field(default_factory=list)  # what the draft's KV holds

    def __post_init__(self) -> None:
        self._truth = Truth(self.trace)
        self._branches = Branches(self.rates)

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
            elif not self._flight:
                self._draft_round(None)
            elif (branch := self._next_branch()) is not None:
                self._draft_round(branch)
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

    @property
    def _may_guess(self) -> bool:
        return self.window.may_guess and self.trace.gaps is not None

    def _next_branch(self) -> Branch[Sent] | None:
        """Where to draft on behind the rounds under way; None: their verdicts come first."""
        choice, flight = self.window.choice, self._flight
        is_leaving = choice is not None and choice.current is Way.CLOUD_ONLY
        if is_leaving or flight[0].arrives_s <= self.now_s:
            return None
        if len(flight) >= (self.window.most if self._may_guess else self.window.size):
            return None
        if not self._may_guess:
            branch = Branch(flight[-1], flight[-1].length, None, 1.0)
            return branch if self._room(branch) > 0 else None
        allowed = None if self.window.has_guesses else _is_sure
        while (best := self._branches.best(allowed)) is not None and best.chance >= LEAST_CHANCE:
            if self._room(best) > 0:
                return best
            self._branches.take(best)
        return None

    def _room(self, branch: Branch[Sent]) -> int:
        return self.trace.num_positions - start_of(branch) - 1

    def _draft_round(self, branch: Branch[Sent] | None) -> None:
        """On `branch`; None: behind the text."""
        first = self.position if branch is None else start_of(branch)
        goes_on = branch is not None and branch.guess is None
        run = branch.host.run if branch is not None and goes_on else self._truth.run_from(first)
        is_true = branch is None or is_right(branch)
        most = min(self.depth.next_depth(), self.trace.num_positions - first - 1, MAX_DEPTH)
        history = self._history(branch, is_true)
        start_s = self.now_s
        self._refeed(history)
        has_first = is_true and (not goes_on or self._truth.num_right(run, first, 1) > 0)
        length = self._draft(first, most, branch, has_first)
        right = self._truth.num_right(run, first, length) if is_true else 0
        ids = [len(history) + j if is_true and j < right else object() for j in range(length)]
        self._fed = history + ids[:-1]
        if branch is not None and self._has_bad_news(branch, has_first):
            self.num_wasted_tokens += length
            return
        runner_ups = self._truth.runner_ups(first, length, right + 1 if is_true else 0)
        chance = 1.0 if branch is None else branch.chance
        draft_s, window = self.now_s - start_s, self.window.size
        sent = Sent(
            first,
            length,
            right,
            has_first,
            run,
            runner_ups,
            branch,
            history,
            ids,
            chance,
            draft_s,
            self.now_s,
            window,
            branch is not None,
        )
        self._send(sent)

    def _draft(self, first: int, most: int, branch: Branch[Sent] | None, is_true: bool) -> int:
        """How many tokens: until the policy ends it, or an answer says that it is for nothing."""
        should_stop = self.depth.stop_rule()
        confidences = self.trace.confidences[min(first, self.trace.num_positions - 1)].tolist()
        length = 0
        while length < most:
            length += 1
            self.now_s += self.models.draft_token_s
            if branch is not None and self._has_bad_news(branch, is_true):
                break
            if should_stop is not None:
                signals = signals_of(confidences[length - 1]) if confidences else None
                if should_stop(_ANY_TOKEN, signals, length) is not Stop.NO:
                    break
        return length

    def _history(self, branch: Branch[Sent] | None, is_true: bool) -> list[object]:
        """Names of the tokens before the draft."""
        if branch is None:
            return list(range(self.position + 1))
        ids = [*branch.host.history, *branch.host.ids[: branch.place]]
        if branch.guess is not None:
            ids.append(len(ids) if is_true else object())
        return ids

    def _refeed(self, wanted: list[object]) -> None:
        """Time for what the draft's KV lacks of the text but for its last token."""
        if not self._may_guess:
            return
        pairs = enumerate(zip(self._fed, wanted, strict=False))
        common = next((i for i, (a, b) in pairs if a != b), min(len(self._fed), len(wanted)))
        self.now_s += max(0, len(wanted) - common - 1) * REFEED_SHARE * self.models.draft_token_s

    def _send(self, sent: Sent) -> None:
        if self._may_guess:
            self.now_s += SEND_S
        link = self.link(self.now_s)
        arrival_s = self.now_s + (link.rtt_s + link.transfer_s(sent.length)) / 2
        sent.start_s = max(arrival_s, self.verifier_free_s)
        # What a bonus confirmed is not fed again.
        fed = sent.length - (1 if sent.is_ahead else 0)
        stale_s = STALE_S if self._may_guess else 0.0
        sent.verified_s = sent.start_s + (self.models.verify_s(fed) if sent.is_judged else stale_s)
        sent.arrives_s = sent.verified_s + (link.rtt_s + link.transfer_s(sent.length)) / 2
        if sent.is_judged or self._may_guess:
            self.verifier_free_s = sent.verified_s
        self._flight.append(sent)
        self.num_guessed_rounds += sent.is_guess
        if self._may_guess:
            self._grow(sent)

    def _grow(self, sent: Sent) -> None:
        before = None
        if sent.behind is not None:
            self._branches.take(sent.behind)
            if sent.is_ahead:
                before = (sent.behind.host, sent.behind.place)
        self._branches.grow(sent, sent.length, sent.chance, sent.runner_ups, before)

    def _has_bad_news(self, branch: Branch[Sent], is_true: bool) -> bool:
        """Whether what has arrived says that the draft on `branch`, which is or is not for nothing, is."""
        path = path_of(branch)
        fates = [each.host.is_judged for each in path[1:]] + [is_true]
        news = [each.host.arrives_s <= self.now_s for each in path]
        return any(has_come and not fate for has_come, fate in zip(news, fates, strict=True))

    def _take_verdict(self) -> None:
        sent = self._flight.pop(0)
        self.now_s = max(self.now_s, sent.arrives_s)
        self._commit(sent.first + sent.num_right + 1 - self.position)
        self._record_answered(sent)
        self.rates.observe(sent.runner_ups, sent.num_right, RIGHT)
        heirs = (each for each in self._flight if each.behind is not None and each.behind.host is sent)
        heir = next((each for each in heirs if each.is_judged), None)
        kept = {id(heir)}
        for each in self._flight:
            if each.behind is not None and id(each.behind.host) in kept:
                kept.add(id(each))
        dropped = [each for each in self._flight if id(each) not in kept]
        self._flight = [each for each in self._flight if id(each) in kept]
        for each in dropped:
            self._record_stale(each, sent)
        chance = 1.0
        if heir is not None:
            chance = heir.chance
            heir.is_guess_hit = heir.is_guess
            self.num_guess_hits += heir.is_guess_hit
            heir.behind = None
        self._branches.keep(lambda host: id(host) in kept, chance)
        for each in self._flight:
            each.chance = min(1.0, each.chance / chance)

    def _record_answered(self, sent: Sent) -> None:
        link = self.link(self.now_s)
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
                pipelined_hit=True if sent.was_ahead else None,
                is_guess_hit=sent.is_guess_hit,
            )
        )

    def _record_stale(self, each: Sent, answered: Sent) -> None:
        self.num_stale_rounds += not each.is_guess
        self.num_wasted_tokens += each.length
        is_next = each.is_ahead and each.behind is not None and each.behind.host is answered
        is_first_wrong = is_next and answered.is_whole
        if is_first_wrong:
            self.rates.observe(each.runner_ups[:1], 0, RIGHT)
        self._record(
            RoundRecord(
                len(self.records) + 1,
                each.length,
                is_answered=False,
                window=each.window,
                pipelined_hit=None if each.is_guess else False,
                is_first_wrong=is_first_wrong,
            )
        )

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
            if number and choice.wants_shadow(number):
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


def _is_sure(branch: Branch[Sent]) -> bool:
    return branch.guess is None and not branch.host.is_guess
