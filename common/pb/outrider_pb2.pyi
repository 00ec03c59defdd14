from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    METHOD_UNSPECIFIED: _ClassVar[Method]
    METHOD_COUPLED: _ClassVar[Method]
    METHOD_SPARSE: _ClassVar[Method]
    METHOD_CANDIDATES: _ClassVar[Method]
    METHOD_BLOCK: _ClassVar[Method]
    METHOD_SHORTCUT: _ClassVar[Method]
    METHOD_SCALAR_RESIDUAL: _ClassVar[Method]
    METHOD_THRESHOLD: _ClassVar[Method]
    METHOD_TYPICAL: _ClassVar[Method]

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_LARK: _ClassVar[GrammarKind]

class Origin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORIGIN_UNSPECIFIED: _ClassVar[Origin]
    ORIGIN_ACCEPTED: _ClassVar[Origin]
    ORIGIN_CORRECTION: _ClassVar[Origin]
    ORIGIN_BONUS: _ClassVar[Origin]
    ORIGIN_TARGET: _ClassVar[Origin]
    ORIGIN_GATE: _ClassVar[Origin]
    ORIGIN_FALLBACK: _ClassVar[Origin]
    ORIGIN_EDGE_ONLY: _ClassVar[Origin]
    ORIGIN_RESENT: _ClassVar[Origin]

class CorrectionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CORRECTION_KIND_NONE: _ClassVar[CorrectionKind]
    CORRECTION_KIND_CORRECTION: _ClassVar[CorrectionKind]
    CORRECTION_KIND_BONUS: _ClassVar[CorrectionKind]

class RoundErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUND_ERROR_CODE_UNSPECIFIED: _ClassVar[RoundErrorCode]
    ROUND_ERROR_CODE_STALE: _ClassVar[RoundErrorCode]
    ROUND_ERROR_CODE_UNKNOWN_PREFIX: _ClassVar[RoundErrorCode]
    ROUND_ERROR_CODE_UNKNOWN_SESSION: _ClassVar[RoundErrorCode]
    ROUND_ERROR_CODE_INVALID: _ClassVar[RoundErrorCode]
    ROUND_ERROR_CODE_REFUSED: _ClassVar[RoundErrorCode]
    ROUND_ERROR_CODE_DRAINING: _ClassVar[RoundErrorCode]
    ROUND_ERROR_CODE_UNIMPLEMENTED: _ClassVar[RoundErrorCode]
    ROUND_ERROR_CODE_CANCELLED: _ClassVar[RoundErrorCode]
    ROUND_ERROR_CODE_INTERNAL: _ClassVar[RoundErrorCode]

class GenerateMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GENERATE_MODE_CLOUD_ONLY: _ClassVar[GenerateMode]
    GENERATE_MODE_CO_LOCATED: _ClassVar[GenerateMode]
METHOD_UNSPECIFIED: Method
METHOD_COUPLED: Method
METHOD_SPARSE: Method
METHOD_CANDIDATES: Method
METHOD_BLOCK: Method
METHOD_SHORTCUT: Method
METHOD_SCALAR_RESIDUAL: Method
METHOD_THRESHOLD: Method
METHOD_TYPICAL: Method
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_LARK: GrammarKind
ORIGIN_UNSPECIFIED: Origin
ORIGIN_ACCEPTED: Origin
ORIGIN_CORRECTION: Origin
ORIGIN_BONUS: Origin
ORIGIN_TARGET: Origin
ORIGIN_GATE: Origin
ORIGIN_FALLBACK: Origin
ORIGIN_EDGE_ONLY: Origin
ORIGIN_RESENT: Origin
CORRECTION_KIND_NONE: CorrectionKind
CORRECTION_KIND_CORRECTION: CorrectionKind
CORRECTION_KIND_BONUS: CorrectionKind
ROUND_ERROR_CODE_UNSPECIFIED: RoundErrorCode
ROUND_ERROR_CODE_STALE: RoundErrorCode
ROUND_ERROR_CODE_UNKNOWN_PREFIX: RoundErrorCode
ROUND_ERROR_CODE_UNKNOWN_SESSION: RoundErrorCode
ROUND_ERROR_CODE_INVALID: RoundErrorCode
ROUND_ERROR_CODE_REFUSED: RoundErrorCode
ROUND_ERROR_CODE_DRAINING: RoundErrorCode
ROUND_ERROR_CODE_UNIMPLEMENTED: RoundErrorCode
ROUND_ERROR_CODE_CANCELLED: RoundErrorCode
ROUND_ERROR_CODE_INTERNAL: RoundErrorCode
GENERATE_MODE_CLOUD_ONLY: GenerateMode
GENERATE_MODE_CO_LOCATED: GenerateMode

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("protocol_version", "model_id", "target_fingerprint", "tokenizer_fingerprint", "dtype", "device", "eos_token_ids", "num_tokens", "limits", "methods", "server_version", "labels", "draft_fingerprint", "is_reproducible", "draft_sources", "quantisation", "memory", "kv_dtype")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    IS_REPRODUCIBLE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SOURCES_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model_id: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    dtype: str
    device: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    limits: Limits
    methods: _containers.RepeatedScalarFieldContainer[Method]
    server_version: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    draft_fingerprint: str
    is_reproducible: bool
    draft_sources: _containers.RepeatedScalarFieldContainer[str]
    quantisation: str
    memory: Memory
    kv_dtype: str
    def __init__(self, protocol_version: _Optional[int] = ..., model_id: _Optional[str] = ..., target_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., methods: _Optional[_Iterable[_Union[Method, str]]] = ..., server_version: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ..., draft_fingerprint: _Optional[str] = ..., is_reproducible: bool = ..., draft_sources: _Optional[_Iterable[str]] = ..., quantisation: _Optional[str] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ..., kv_dtype: _Optional[str] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("weights", "kv", "peak", "peak_reserved")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    PEAK_FIELD_NUMBER: _ClassVar[int]
    PEAK_RESERVED_FIELD_NUMBER: _ClassVar[int]
    weights: int
    kv: int
    peak: int
    peak_reserved: int
    def __init__(self, weights: _Optional[int] = ..., kv: _Optional[int] = ..., peak: _Optional[int] = ..., peak_reserved: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_context", "max_draft_tokens", "max_message_bytes", "max_sessions", "session_idle_ttl_ms", "max_sampling_ids", "max_tree_nodes", "max_grammar_bytes")
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDLE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLING_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TREE_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAMMAR_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_context: int
    max_draft_tokens: int
    max_message_bytes: int
    max_sessions: int
    session_idle_ttl_ms: int
    max_sampling_ids: int
    max_tree_nodes: int
    max_grammar_bytes: int
    def __init__(self, max_context: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_sessions: _Optional[int] = ..., session_idle_ttl_ms: _Optional[int] = ..., max_sampling_ids: _Optional[int] = ..., max_tree_nodes: _Optional[int] = ..., max_grammar_bytes: _Optional[int] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("open", "verify", "generate", "cancel", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: OpenRequest
    verify: VerifyRequest
    generate: GenerateRequest
    cancel: CancelRequest
    close: CloseRequest
    def __init__(self, open: _Optional[_Union[OpenRequest, _Mapping]] = ..., verify: _Optional[_Union[VerifyRequest, _Mapping]] = ..., generate: _Optional[_Union[GenerateRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., close: _Optional[_Union[CloseRequest, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("open", "verify", "generate", "close", "draining")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    open: OpenResponse
    verify: VerifyResponse
    generate: GenerateResponse
    close: CloseResponse
    draining: Draining
    def __init__(self, open: _Optional[_Union[OpenResponse, _Mapping]] = ..., verify: _Optional[_Union[VerifyResponse, _Mapping]] = ..., generate: _Optional[_Union[GenerateResponse, _Mapping]] = ..., close: _Optional[_Union[CloseResponse, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class MethodParams(_message.Message):
    __slots__ = ("threshold_pass", "threshold_ratio", "typical_epsilon", "typical_delta", "num_candidates")
    THRESHOLD_PASS_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_RATIO_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_EPSILON_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_DELTA_FIELD_NUMBER: _ClassVar[int]
    NUM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    threshold_pass: float
    threshold_ratio: float
    typical_epsilon: float
    typical_delta: float
    num_candidates: int
    def __init__(self, threshold_pass: _Optional[float] = ..., threshold_ratio: _Optional[float] = ..., typical_epsilon: _Optional[float] = ..., typical_delta: _Optional[float] = ..., num_candidates: _Optional[int] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text", "has_whitespace")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    HAS_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    text: str
    has_whitespace: bool
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[str] = ..., has_whitespace: bool = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "seed", "min_new_tokens", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    seed: int
    min_new_tokens: int
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., seed: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("session_id", "token_ids", "num_prompt_tokens", "sampling", "method", "method_params", "tokenizer_fingerprint", "target_fingerprint", "ignore_eos", "stop_token_ids", "num_logprobs", "origins_resent", "round_id", "draft_source", "num_prompt_choices")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    METHOD_PARAMS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_RESENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_CHOICES_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    method: Method
    method_params: MethodParams
    tokenizer_fingerprint: str
    target_fingerprint: str
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: int
    origins_resent: bool
    round_id: int
    draft_source: str
    num_prompt_choices: int
    def __init__(self, session_id: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., method: _Optional[_Union[Method, str]] = ..., method_params: _Optional[_Union[MethodParams, _Mapping]] = ..., tokenizer_fingerprint: _Optional[str] = ..., target_fingerprint: _Optional[str] = ..., ignore_eos: bool = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[int] = ..., origins_resent: bool = ..., round_id: _Optional[int] = ..., draft_source: _Optional[str] = ..., num_prompt_choices: _Optional[int] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("opened", "progress", "error")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    progress: Progress
    error: RoundError
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., error: _Optional[_Union[RoundError, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("describe", "first_token", "position", "hash", "is_existing", "metrics", "logprobs", "step_fixed_ns", "step_token_ns", "prompt_choices", "step_session_ns", "stream_gap_ns")
    DESCRIBE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    IS_EXISTING_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIXED_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CHOICES_FIELD_NUMBER: _ClassVar[int]
    STEP_SESSION_NS_FIELD_NUMBER: _ClassVar[int]
    STREAM_GAP_NS_FIELD_NUMBER: _ClassVar[int]
    describe: DescribeResponse
    first_token: int
    position: int
    hash: int
    is_existing: bool
    metrics: RoundMetrics
    logprobs: TokenLogprobs
    step_fixed_ns: int
    step_token_ns: int
    prompt_choices: _containers.RepeatedScalarFieldContainer[int]
    step_session_ns: int
    stream_gap_ns: int
    def __init__(self, describe: _Optional[_Union[DescribeResponse, _Mapping]] = ..., first_token: _Optional[int] = ..., position: _Optional[int] = ..., hash: _Optional[int] = ..., is_existing: bool = ..., metrics: _Optional[_Union[RoundMetrics, _Mapping]] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ..., step_fixed_ns: _Optional[int] = ..., step_token_ns: _Optional[int] = ..., prompt_choices: _Optional[_Iterable[int]] = ..., step_session_ns: _Optional[int] = ..., stream_gap_ns: _Optional[int] = ...) -> None: ...

class Support(_message.Message):
    __slots__ = ("token_ids", "weights")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[int]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("round_id", "base_position", "base_hash", "committed_tokens", "origins", "draft_tokens", "q_token_probs", "hard_mask", "q_support", "parents", "candidates_from", "pipelined", "session_id", "deadline_ms")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_POSITION_FIELD_NUMBER: _ClassVar[int]
    BASE_HASH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    Q_TOKEN_PROBS_FIELD_NUMBER: _ClassVar[int]
    HARD_MASK_FIELD_NUMBER: _ClassVar[int]
    Q_SUPPORT_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FROM_FIELD_NUMBER: _ClassVar[int]
    PIPELINED_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    base_position: int
    base_hash: int
    committed_tokens: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[Origin]
    draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    q_token_probs: _containers.RepeatedScalarFieldContainer[float]
    hard_mask: bytes
    q_support: _containers.RepeatedCompositeFieldContainer[Support]
    parents: _containers.RepeatedScalarFieldContainer[int]
    candidates_from: int
    pipelined: bool
    session_id: bytes
    deadline_ms: int
    def __init__(self, round_id: _Optional[int] = ..., base_position: _Optional[int] = ..., base_hash: _Optional[int] = ..., committed_tokens: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[Origin, str]]] = ..., draft_tokens: _Optional[_Iterable[int]] = ..., q_token_probs: _Optional[_Iterable[float]] = ..., hard_mask: _Optional[bytes] = ..., q_support: _Optional[_Iterable[_Union[Support, _Mapping]]] = ..., parents: _Optional[_Iterable[int]] = ..., candidates_from: _Optional[int] = ..., pipelined: bool = ..., session_id: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("verdict", "error", "progress")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    verdict: Verdict
    error: RoundError
    progress: Progress
    def __init__(self, verdict: _Optional[_Union[Verdict, _Mapping]] = ..., error: _Optional[_Union[RoundError, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("round_id", "accepted_len", "accepted_nodes", "correction", "correction_kind", "position", "hash", "candidates", "logprobs", "metrics")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_LEN_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_NODES_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_KIND_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    accepted_len: int
    accepted_nodes: _containers.RepeatedScalarFieldContainer[int]
    correction: int
    correction_kind: CorrectionKind
    position: int
    hash: int
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    metrics: RoundMetrics
    def __init__(self, round_id: _Optional[int] = ..., accepted_len: _Optional[int] = ..., accepted_nodes: _Optional[_Iterable[int]] = ..., correction: _Optional[int] = ..., correction_kind: _Optional[_Union[CorrectionKind, str]] = ..., position: _Optional[int] = ..., hash: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., metrics: _Optional[_Union[RoundMetrics, _Mapping]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("token_id", "target_prob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    target_prob: float
    def __init__(self, token_id: _Optional[int] = ..., target_prob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("raw_logprob", "processed_logprob", "top_token_ids", "top_logprobs")
    RAW_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    raw_logprob: float
    processed_logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, raw_logprob: _Optional[float] = ..., processed_logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class RoundMetrics(_message.Message):
    __slots__ = ("alpha_mean", "la_over_k", "queue_ns", "forward_ns", "total_ns", "batch_size", "step_token_ns", "num_active_sessions")
    ALPHA_MEAN_FIELD_NUMBER: _ClassVar[int]
    LA_OVER_K_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIVE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    alpha_mean: float
    la_over_k: float
    queue_ns: int
    forward_ns: int
    total_ns: int
    batch_size: int
    step_token_ns: int
    num_active_sessions: int
    def __init__(self, alpha_mean: _Optional[float] = ..., la_over_k: _Optional[float] = ..., queue_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., batch_size: _Optional[int] = ..., step_token_ns: _Optional[int] = ..., num_active_sessions: _Optional[int] = ...) -> None: ...

class RoundError(_message.Message):
    __slots__ = ("round_id", "code", "field", "message", "retry_after_ms", "position", "hash")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    code: RoundErrorCode
    field: str
    message: str
    retry_after_ms: int
    position: int
    hash: int
    def __init__(self, round_id: _Optional[int] = ..., code: _Optional[_Union[RoundErrorCode, str]] = ..., field: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., position: _Optional[int] = ..., hash: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("round_id", "done", "total")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    done: int
    total: int
    def __init__(self, round_id: _Optional[int] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("round_id", "base_position", "base_hash", "committed_tokens", "origins", "max_new_tokens", "mode", "num_speculative_tokens", "session_id", "is_tree")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_POSITION_FIELD_NUMBER: _ClassVar[int]
    BASE_HASH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    IS_TREE_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    base_position: int
    base_hash: int
    committed_tokens: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[Origin]
    max_new_tokens: int
    mode: GenerateMode
    num_speculative_tokens: int
    session_id: bytes
    is_tree: bool
    def __init__(self, round_id: _Optional[int] = ..., base_position: _Optional[int] = ..., base_hash: _Optional[int] = ..., committed_tokens: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[Origin, str]]] = ..., max_new_tokens: _Optional[int] = ..., mode: _Optional[_Union[GenerateMode, str]] = ..., num_speculative_tokens: _Optional[int] = ..., session_id: _Optional[bytes] = ..., is_tree: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("tokens", "error", "progress")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    tokens: GeneratedTokens
    error: RoundError
    progress: Progress
    def __init__(self, tokens: _Optional[_Union[GeneratedTokens, _Mapping]] = ..., error: _Optional[_Union[RoundError, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class GeneratedTokens(_message.Message):
    __slots__ = ("round_id", "token_ids", "origins", "position", "hash", "is_last", "metrics", "logprobs", "num_draft_tokens", "draft_ns")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NS_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[Origin]
    position: int
    hash: int
    is_last: bool
    metrics: RoundMetrics
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    num_draft_tokens: int
    draft_ns: int
    def __init__(self, round_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[Origin, str]]] = ..., position: _Optional[int] = ..., hash: _Optional[int] = ..., is_last: bool = ..., metrics: _Optional[_Union[RoundMetrics, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., num_draft_tokens: _Optional[int] = ..., draft_ns: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("round_id",)
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    def __init__(self, round_id: _Optional[int] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    def __init__(self, session_id: _Optional[bytes] = ...) -> None: ...

class CloseResponse(_message.Message):
    __slots__ = ("was_open", "position")
    WAS_OPEN_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    was_open: bool
    position: int
    def __init__(self, was_open: bool = ..., position: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("grace_ms", "reason")
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    grace_ms: int
    reason: str
    def __init__(self, grace_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
