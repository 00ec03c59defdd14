"""Data that both sides exchange: parameters, drafts, rounds and their answers.

Dataclasses here, protobuf only in `outrider.common.codec`. Token ids are plain ints in tuples; probabilities
are Python floats (float32 on the wire); hashes are ints (64 bits); durations end in `_ns`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PROTOCOL_VERSION = 1  # of the messages; sides with different versions refuse each other
LOADING = "loading the target"  # a verifier's answer to all calls, as UNAVAILABLE, until it has loaded

TokenIds = tuple[int, ...]

DRAFT_SOURCE = "draft"  # names a draft model among what may draft
EARLY_EXIT = "early_exit"  # names drafting by some of the target's own layers
LOOKAHEAD = "lookahead"  # names lookahead decoding

MAX_PROMPT_CHOICES = 32  # that an opening may ask for


class Origin(enum.StrEnum):
    """Names where a committed token came from."""

    ACCEPTED = "accepted"  # drafted, and confirmed by the target
    CORRECTION = "correction"  # the target's token at the first rejection
    BONUS = "bonus"  # the target's token after a fully accepted draft
    TARGET = "target"  # the target alone: an opening's first token, cloud-only decoding
    GATE = "gate"  # kept by the commit-gate without asking (lossy)
    FALLBACK = "fallback"  # kept after a timeout (unverified)
    EDGE_ONLY = "edge_only"  # the draft alone (unverified)
    RESENT = "resent"  # sent again to rebuild a session

    @property
    def is_verified(self) -> bool:
        """Returns whether the target has verified the token."""
        return self not in _UNVERIFIED

    @property
    def is_judged(self) -> bool:
        """Returns whether a verification method judged the token; an approximate one makes it approximate."""
        return self in (Origin.ACCEPTED, Origin.CORRECTION)


_UNVERIFIED = (Origin.GATE, Origin.FALLBACK, Origin.EDGE_ONLY)


class FinishReason(enum.StrEnum):
    """Names why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    CANCELLED = "cancelled"
    ERROR = "error"


class Method(enum.StrEnum):
    """Names the verification methods; `ModelInfo.methods` lists those that a verifier offers."""

    COUPLED = "coupled"
    SPARSE = "sparse"
    CANDIDATES = "candidates"
    BLOCK = "block"
    SHORTCUT = "shortcut"
    SCALAR_RESIDUAL = "scalar_residual"
    THRESHOLD = "threshold"
    TYPICAL = "typical"

    @property
    def is_exact(self) -> bool:
        """Returns whether the sequence has the target's distribution.

        Given an honest q, that is; `coupled` needs none.
        """
        return self in (Method.COUPLED, Method.SPARSE, Method.CANDIDATES, Method.BLOCK)


class CorrectionKind(enum.StrEnum):
    """Names the token after the accepted ones: a correction, a bonus, or none."""

    NONE = "none"
    CORRECTION = "correction"
    BONUS = "bonus"


class RoundErrorCode(enum.StrEnum):
    """Names why a round was not verified (docs/protocol.md)."""

    STALE = "stale"
    UNKNOWN_PREFIX = "unknown_prefix"
    UNKNOWN_SESSION = "unknown_session"
    INVALID = "invalid"
    REFUSED = "refused"
    DRAINING = "draining"
    UNIMPLEMENTED = "unimplemented"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class GrammarKind(enum.StrEnum):
    """Names the languages that a grammar may be written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"  # llguidance's dialect


@dataclass(frozen=True, slots=True)
class Grammar:
    """Holds what a text must obey after its prompt. Two with the same text are equal, compiled or not.

    `compiled` is filled by `outrider.common.grammar.vocabulary.Vocabulary.compile`: nothing is sampled without it.
    """

    kind: GrammarKind
    text: str
    has_whitespace: bool = False  # JSON schemas: allow any between tokens, not none
    compiled: Any = field(default=None, compare=False, repr=False)  # a `CompiledGrammar`


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Holds the parameters that turn logits into a distribution (docs/design.md §5), and the noise's seed.

    Values out of range are rejected by `outrider.common.sampling.processors.check_sampling_params`.
    """

    temperature: float = 0.8  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[TokenIds, ...] = ()
    min_new_tokens: int = 0
    seed: int = 0  # uint64
    grammar: Grammar | None = None
    held_back: TokenIds = ()  # ids that `min_new_tokens` masks as end-of-text; see `holding_back`


UNLIMITED_TOKENS = 2**31 - 1  # more than any context takes; fits the wire's uint32


@dataclass(frozen=True, slots=True)
class StopParams:
    """Holds the conditions that end a sequence. Stop strings are never sent: the edge detokenises."""

    max_new_tokens: int = 256  # UNLIMITED_TOKENS: the context alone bounds it
    stop_token_ids: TokenIds = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    shows_special_tokens: bool = False  # never sent, as stop strings
    min_new_tokens: int = 0  # after so many tokens stop strings count; never sent, as they


@dataclass(frozen=True, slots=True)
class Signals:
    """Holds the draft's uncertainty at one position, from its unprocessed distribution."""

    entropy_bits: float
    nll: float  # of the drafted token, nats
    margin: float  # probability of the first minus the second token
    # Of the first token's ln p between passes under keyed dropout, nats², where the draft can do that. No
    # function of the drafted token, nor of the noise it was sampled with.
    variance: float | None = None


@dataclass(frozen=True, slots=True)
class Support:
    """Holds the draft's truncated distribution at one position; q = weight / Σ weights, in float64."""

    token_ids: TokenIds
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """Holds the token that the draft would have chosen instead of the drafted one.

    It scored `gap` nats less, shared noise included.
    """

    token_id: int
    gap: float


@dataclass(frozen=True, slots=True)
class Draft:
    """Holds one proposal: `token_ids[i]` was sampled with probability `draft_probs[i]` (q).

    `supports[i]`, where the method needs one, is the distribution it was sampled from; of a tree there is one for each
    node with children, in order, the root first, from which these were drawn without replacement. `doubted` are the
    signals of the token at which a stop rule ended the draft: it was sampled, and dropped. `runner_ups[i]` is
    filled where a sequence was asked for it (`outrider.edge_client.drafting.base.KeepsRunnerUps`). `parents` are
    those of a tree (`outrider.common.tree`), none of a chain.
    """

    token_ids: TokenIds
    draft_probs: tuple[float, ...]
    signals: tuple[Signals, ...] = ()
    supports: tuple[Support, ...] = ()
    doubted: Signals | None = None
    runner_ups: tuple[RunnerUp, ...] = ()
    parents: tuple[int, ...] = ()

    @property
    def confidences(self) -> tuple[float, ...]:
        """Returns the draft's probability of each token before any sampling parameter; needs signals."""
        return tuple(math.exp(-each.nll) for each in self.signals)


@dataclass(frozen=True, slots=True)
class MethodParams:
    """Holds parameters of single methods; None means the method's default."""

    threshold_pass: float | None = None
    threshold_ratio: float | None = None
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    num_candidates: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Holds a verifier's limits; a session is dropped when it was idle for `session_idle_ttl_ms`."""

    max_context: int
    max_draft_tokens: int
    max_message_bytes: int
    max_sessions: int
    session_idle_ttl_ms: int
    max_sampling_ids: int = 0  # in logit_bias, bad_words and stop_token_ids of an opening; 0 is no limit
    max_tree_nodes: int = 0  # drafted tokens of a round that is a tree; 0: it takes no trees
    max_grammar_bytes: int = 0  # of a grammar's text; 0: it takes no grammars


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Holds what a verifier's target takes, in bytes. Peaks are since its start; 0: not told."""

    weights: int
    kv: int  # the pool for all sessions
    peak: int = 0  # on a GPU of what is allocated there, else of what is resident
    peak_reserved: int = 0  # on a GPU, by the library's allocator


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Describes the target that a verifier serves (`Describe`)."""

    protocol_version: int
    model_id: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    dtype: str
    device: str
    eos_token_ids: TokenIds
    num_tokens: int  # ids at or above this do not exist
    limits: Limits
    methods: tuple[Method, ...]
    server_version: str
    labels: tuple[str, ...] = ()
    draft_fingerprint: str = ""  # of the draft for co-located generation; empty: there is none
    is_reproducible: bool = False  # a token's logits do not depend on what shares its forward
    draft_sources: tuple[str, ...] = ()  # what may draft for co-located generation; the draft is DRAFT_SOURCE
    kv_dtype: str = ""  # of keys and values; empty: not known
    quantisation: str = ""  # of the weights: "nf4", "fp4" or "fp8"; empty: none
    memory: MemoryUse | None = None  # None: an older verifier does not tell


@dataclass(slots=True, unsafe_hash=True)  # not frozen, which takes seven times as long to make: one a round
class RoundMetrics:
    """Holds a round's acceptance and times, as the verifier measured them."""

    alpha_mean: float = float("nan")  # mean min(1, p/q) over the positions judged
    la_over_k: float = 0.0
    queue_ns: int = 0
    forward_ns: int = 0
    total_ns: int = 0
    batch_size: int = 0  # sessions in the forward; 0: the verifier hides it
    step_token_ns: int = 0  # what a token added to a step lately; 0: not known yet
    num_active_sessions: int = 0  # answered within the last second; 0: the verifier hides it, or is older


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Holds one token's log-probabilities, and the most probable ids with theirs."""

    raw_logprob: float
    processed_logprob: float
    top_token_ids: TokenIds = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """Holds a sample of the target's distribution and its probability p."""

    token_id: int
    target_prob: float


# ------------------------------------------------------------------------------ edge → verifier


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """Opens a session with a prompt, or rebuilds one with all committed tokens."""

    session_id: bytes  # 16 bytes
    token_ids: TokenIds
    num_prompt_tokens: int
    sampling: SamplingParams
    method: Method = Method.COUPLED
    method_params: MethodParams = field(default_factory=MethodParams)
    tokenizer_fingerprint: str = ""
    target_fingerprint: str = ""  # expected; empty accepts any
    ignore_eos: bool = False
    stop_token_ids: TokenIds = ()
    num_logprobs: int = 0
    is_rebuild: bool = False
    round_id: int = 0
    draft_source: str = (
        ""  # what drafts for co-located generation, of `ModelInfo.draft_sources`; empty: the draft
    )
    num_prompt_choices: int = 0  # wanted in `Opened.prompt_choices`


@dataclass(slots=True, unsafe_hash=True)  # not frozen: see RoundMetrics
class VerifyRequest:
    """Sends one round: tokens committed since the last answer, and a draft to be verified."""

    round_id: int
    base_position: int
    base_hash: int
    committed_tokens: TokenIds = ()
    origins: tuple[Origin, ...] = ()
    draft_tokens: TokenIds = ()
    q_token_probs: tuple[float, ...] = ()
    hard_mask: bytes = b""
    q_support: tuple[Support, ...] = ()  # `Draft.supports`
    parents: TokenIds = ()  # of a draft that is a tree (`outrider.common.tree`); none: a chain
    candidates_from: int = 0
    pipelined: bool = False
    session_id: bytes = b""  # unary calls only
    deadline_ms: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Lets the verifier decode a number of tokens and stream them, with a co-located draft or without."""

    round_id: int
    base_position: int
    base_hash: int
    max_new_tokens: int
    committed_tokens: TokenIds = ()
    origins: tuple[Origin, ...] = ()
    is_co_located: bool = False
    num_speculative_tokens: int = 0
    session_id: bytes = b""  # unary calls only
    is_tree: bool = False  # co-located only: these are the nodes of a tree


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Ends the `GenerateRequest` of a round; its committed tokens stay."""

    round_id: int


@dataclass(frozen=True, slots=True)
class CloseRequest:
    """Ends a session."""

    session_id: bytes = b""  # unary calls only


SessionRequest = OpenRequest | VerifyRequest | GenerateRequest | CancelRequest | CloseRequest

# ------------------------------------------------------------------------------ verifier → edge


@dataclass(frozen=True, slots=True)
class Opened:
    """Answers an opening with the target's first token and the model's description."""

    model: ModelInfo
    first_token: int
    position: int  # committed tokens, `first_token` included
    hash: int
    is_existing: bool = False
    metrics: RoundMetrics = field(default_factory=RoundMetrics)
    logprobs: TokenLogprobs | None = None
    # A step of n tokens of s sessions took this, s times `step_session_ns` and n times `step_token_ns` lately.
    step_fixed_ns: int = 0
    step_session_ns: int = 0
    step_token_ns: int = 0  # all 0: not known
    stream_gap_ns: int = 0  # between two steps of a stream alone; 0: not known
    # What the target would have chosen in place of the last of the opening's tokens, with the session's noise.
    prompt_choices: TokenIds = ()


@dataclass(slots=True, unsafe_hash=True)  # not frozen: see RoundMetrics
class Verdict:
    """Answers a round: `accepted_len` draft tokens are accepted, then follows `correction` (unless NONE)."""

    round_id: int
    accepted_len: int
    correction: int
    correction_kind: CorrectionKind
    position: int  # committed tokens after the round
    hash: int
    accepted_nodes: tuple[int, ...] = ()  # of a tree: indices of the accepted draft tokens, in order
    candidates: tuple[Candidate, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    metrics: RoundMetrics = field(default_factory=RoundMetrics)

    @property
    def accepted_indices(self) -> Sequence[int]:
        """Returns the indices of the accepted draft tokens, in order: of a chain the first ones."""
        return self.accepted_nodes or range(self.accepted_len)


@dataclass(frozen=True, slots=True)
class RoundError:
    """Answers a request that failed, with the verifier's own `position` and `hash`.

    A refusal has `retry_after_ms`.
    """

    round_id: int
    code: RoundErrorCode
    message: str
    field: str = ""
    retry_after_ms: int = 0
    position: int = 0
    hash: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Reports how many of the tokens of a long prefill are done."""

    round_id: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """Contains tokens of a `GenerateRequest`, streamed step by step."""

    round_id: int
    token_ids: TokenIds
    origins: tuple[Origin, ...]
    position: int
    hash: int
    is_last: bool = False
    metrics: RoundMetrics = field(default_factory=RoundMetrics)
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_draft_tokens: int = 0  # co-located only: drafted for this step
    draft_ns: int = 0  # co-located only: what the drafting took


@dataclass(frozen=True, slots=True)
class Closed:
    """Answers a `CloseRequest`."""

    was_open: bool
    position: int


@dataclass(frozen=True, slots=True)
class Draining:
    """Announces that the verifier will stop after `grace_ms`."""

    grace_ms: int
    reason: str


SessionResponse = Opened | Verdict | GeneratedTokens | RoundError | Progress | Closed | Draining
