"""The verifier's configuration: one frozen dataclass, from which flags, YAML keys and variables come."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from outrider.common.config.fields import option
from outrider.common.config.loader import did_you_mean
from outrider.common.config.units import parse_size
from outrider.common.errors import ConfigError
from outrider.common.types import Method
from outrider.models import EMBEDDED

SCOPE = "verifier"  # OUTRIDER_VERIFIER_...
EMBEDDED_TARGET = EMBEDDED / "target"
EMBEDDED_DRAFT = EMBEDDED_TARGET.parent / "draft"

# What goes on the wire: gRPC's own sizes are int32, our limits uint32, and times are in milliseconds there.
MAX_COUNT, MAX_TIME_S = 1_000_000_000, 4_000_000.0
MAX_THREADS = 1024  # of torch or onnxruntime, which fail by their own errors far beyond

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?", re.ASCII)


def parse_kv_memory(text: str) -> int | None:
    """Returns the bytes of `--kv-memory`, None for "auto"; raises `ConfigError`."""
    if text.strip().lower() == "auto":
        return None
    try:
        return parse_size(text, "--kv-memory")
    except ConfigError as error:
        raise ConfigError(f"{error}; or auto") from error


def check_device_name(device: str) -> None:
    """Raises `ConfigError` for a device that is neither auto nor named as torch names it."""
    if not _DEVICE.fullmatch(device):
        raise ConfigError(
            f"--device {device}: not a device; write cpu, cuda or cuda:N, N counted from 0, or auto"
        )


def parse_methods(text: str) -> tuple[Method, ...]:
    """Returns the methods of "coupled,sparse", all of them for "". Raises `ConfigError` for an unknown name."""
    names = [name.strip() for name in text.split(",") if name.strip()] or list(Method)
    for name in names:
        if name not in set(Method):
            hint = did_you_mean(name, Method)
            raise ConfigError(
                f"--methods {text}: there is no method {name!r}{hint} There are {', '.join(Method)}"
            )
    return tuple(method for method in Method if method in names)


# Where more comes than a target of 30 ms a step and 2 a token can take, 100 ms let five rounds into a step, 150 eight.
_MAX_QUEUE_MS = 150.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds the requests that wait. A limit of 0 tokens is none."""

    max_queue_ms: float = _MAX_QUEUE_MS  # a round waits for others at most this long, or two steps of its own
    max_queue_tokens: int = 65_536
    tenant_max_queue_tokens: int = 0


_MAX_CALLS, _TENANT_MAX_CALLS = 4096, 512


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Bounds the calls of tenants and what their requests hold until they are answered. 0 is no limit."""

    max_calls: int = _MAX_CALLS
    tenant_max_calls: int = _TENANT_MAX_CALLS
    tenant_max_waiting_ids: int = 1 << 20
    idle_ttl_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Holds the options of `cloud-verifier serve`."""

    target: Path = option(EMBEDDED_TARGET, "Hugging Face model directory with safetensors", metavar="DIR")
    draft: str = option(
        "",
        "exported draft for co-located speculation; empty means the embedded draft with the embedded target, "
        "and none with any other target",
        metavar="DIR|none",
    )
    heads: tuple[str, ...] = option(
        (),
        "directory of heads trained for this target (Medusa, Hydra, EAGLE), or of its own layers that draft (early "
        "exit), as draft sources of co-located generation; may be repeated",
        metavar="DIR",
    )
    lookahead: bool = option(
        False, "offer lookahead decoding, which needs no weights, as a draft source of co-located generation"
    )
    draft_strategy: str = option("model", "draft strategy of --draft", metavar="NAME")
    draft_threads: int = option(1, "CPU threads of --draft", metavar="N", minimum=1, maximum=MAX_THREADS)
    draft_kv_memory: str = option(
        "256MiB",
        "memory for the KV of --draft and --heads, and as much for the features of prompts; a co-located generation "
        "beyond it goes on with the target alone",
        metavar="SIZE",
    )
    listen: str = option(
        "127.0.0.1:7077", "address to serve on; port 0 takes a free one", metavar="HOST:PORT"
    )
    admin_listen: str = option(
        "127.0.0.1:7078",
        "address of the admin port: /metrics /healthz /readyz /version; plain HTTP on loopback, beyond it "
        "HTTPS and an admin token; none turns it off",
        metavar="HOST:PORT",
    )
    probe_listen: str = option(
        "none",
        "address of gRPC health alone, in plain text and without credentials, for probes that have neither "
        "(Kubernetes'); it reports whether this verifier is ready and alive, and nothing else",
        metavar="HOST:PORT",
    )
    tls_cert: Path | None = option(
        None,
        "certificate chain of this verifier, PEM; files of certificates and tokens are read again when they "
        "change, and on SIGHUP",
        metavar="FILE",
    )
    tls_key: Path | None = option(None, "private key of --tls-cert; PEM, without a password", metavar="FILE")
    tls_client_ca: Path | None = option(
        None,
        "certificate authorities of clients, PEM: every client must present a certificate of one; without "
        "--tokens its common name is the tenant",
        metavar="FILE",
    )
    tokens: Path | None = option(
        None,
        "file of bearer tokens, made by `cloud-verifier token new`: every client must send one",
        metavar="FILE",
    )
    insecure: bool = option(
        False, "serve beyond loopback without encryption or credentials; for networks you trust"
    )
    reflection: bool = option(False, "answer gRPC reflection, for tools such as grpcurl")
    device: str = option(
        "auto",
        "where the target runs: auto is the first CUDA device, else the CPU; cpu, cuda or cuda:N",
        metavar="DEVICE",
    )
    dtype: str = option(
        "auto",
        "data type of weights and arithmetic; auto is float32 on a CPU, bfloat16 on CUDA and beside quantised weights",
        choices=("auto", "float32", "bfloat16"),
    )
    quantize: str = option(
        "none",
        "quantise the weights of the layers while they are loaded: nf4, 4 bits each (needs the extra quant), or none; "
        "a directory that is saved in NF4 needs no flag",
        metavar="nf4|none",
    )
    exact_rows: str = option(
        "auto",
        "compute a token's logits with the same bits whatever shares its forward, so that sampled and greedy text "
        "is cloud-only's in every dtype; auto: where a check at the start shows that it holds; on: refuse to "
        "start otherwise",
        choices=("auto", "on", "off"),
    )
    num_threads: int = option(
        0, "CPU threads of a forward; 0 is torch's choice", metavar="N", minimum=0, maximum=MAX_THREADS
    )
    kv_dtype: str = option(
        "auto",
        "data type of keys and values in the KV pool; auto is --dtype; fp8 is e4m3 with a float16 scale for each token "
        "and head, about half of bfloat16's memory: the target is then another one, and edges see that",
        choices=("auto", "fp8"),
    )
    kv_memory: str = option(
        "auto",
        "memory of the KV pool for all sessions, such as 800MiB or 1.5GiB; auto is 512MiB on a CPU, on CUDA what is "
        "free beside the weights and a step",
        metavar="SIZE",
    )
    max_step_tokens: int = option(512, "most tokens in one packed forward", metavar="N", minimum=2)
    prefill_chunk_tokens: int = option(
        0,
        "tokens of prompts in a forward that also carries rounds, more where many wait; 0 is 32 on a CPU, 256 on CUDA",
        metavar="N",
        minimum=0,
    )
    max_queue_ms: float = option(
        _MAX_QUEUE_MS,
        "a round is refused, with a retry hint, if it would wait for others longer than this and two steps",
        metavar="MS",
        minimum=0.0,
    )
    max_queue_tokens: int = option(
        65_536,
        "most tokens of rounds that may wait, and as many of prompts; beyond it a tenant with less than its equal "
        "share is let in, up to about twice as many of all; 0 is no limit",
        metavar="N",
        minimum=0,
    )
    tenant_max_queue_tokens: int = option(
        0, "--max-queue-tokens for each tenant; 0 is no limit of its own", metavar="N", minimum=0
    )
    methods: str = option(
        "",
        "verification methods that sessions may ask for, with commas between: coupled,sparse; empty is all",
        metavar="NAMES",
    )
    max_draft_tokens: int = option(
        64, "most drafted tokens in one round", metavar="N", minimum=1, maximum=MAX_COUNT
    )
    max_tree_nodes: int = option(
        64, "most drafted tokens of one round that is a tree; 0 takes no trees", metavar="N", minimum=0
    )
    max_grammar_bytes: int = option(
        65_536,
        "longest JSON schema, regular expression or grammar of a session; 0 takes none",
        metavar="BYTES",
        minimum=0,
        maximum=MAX_COUNT,
    )
    max_grammar_memory: str = option(
        "2GiB",
        "memory for the grammars of all sessions; beyond it openings with one are refused",
        metavar="SIZE",
    )
    tenant_max_grammar_memory: str = option("1GiB", "--max-grammar-memory for each tenant", metavar="SIZE")
    max_sampling_ids: int = option(
        32_768,
        "most ids in stop ids, logit biases and bad words of one session together, of which bad words may be a "
        "quarter; 0 is no limit",
        metavar="N",
        minimum=0,
        maximum=MAX_COUNT,
    )
    max_message_bytes: int = option(
        1 << 20, "largest size of one message", metavar="BYTES", minimum=1024, maximum=MAX_COUNT
    )
    max_sessions: int = option(1024, "most sessions at once", metavar="N", minimum=1, maximum=MAX_COUNT)
    tenant_max_sessions: int = option(
        0, "most sessions of one tenant; 0 is no limit of its own", metavar="N", minimum=0
    )
    tenant_max_sampling_ids: int = option(
        1 << 20,
        "most stop ids, logit biases and bad words in all sessions of a tenant, a stop id counting twice and a bias "
        "three times: about 50 bytes each; its idle sessions give way first; 0 is no limit",
        metavar="N",
        minimum=0,
    )
    session_max_tokens: int = option(
        0, "most tokens in one session; 0 is the target's context", metavar="N", minimum=0
    )
    max_calls: int = option(_MAX_CALLS, "most streams and unary calls at once", metavar="N", minimum=1)
    tenant_max_calls: int = option(
        _TENANT_MAX_CALLS, "--max-calls for each tenant; 0 is no limit of its own", metavar="N", minimum=0
    )
    tenant_max_waiting_ids: int = option(
        1 << 20,
        "most ids in a tenant's unanswered requests: tokens, supports, biases, bad words; 0 is no limit",
        metavar="N",
        minimum=0,
    )
    hide_batch_size: bool = option(
        False,
        "answer with 0 for the sessions in a step and for the active ones: they tell a tenant how many others are "
        "served",
    )
    max_unread_bytes: int = option(
        1 << 18,
        "a stream whose client leaves more answers than this unread is ended",
        metavar="BYTES",
        minimum=1024,
    )
    session_idle_ttl_s: float = option(
        600.0,
        "a session or stream idle for longer than this is closed",
        metavar="S",
        minimum=0.1,
        maximum=MAX_TIME_S,
    )
    drain_grace_s: float = option(
        10.0, "how long a stop waits for open streams", metavar="S", minimum=0.0, maximum=MAX_TIME_S
    )
    min_forward_ms: float = option(
        0.0,
        "make every forward take at least this long, to emulate a larger target; marked by a label",
        metavar="MS",
        minimum=0.0,
        maximum=MAX_TIME_S,
    )
    log_level: str = option("info", "how much to log", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, "log one JSON object per line")
    otlp_endpoint: str = option("", "OpenTelemetry collector for spans; needs the otel extra", metavar="URL")

    @property
    def queue_limits(self) -> QueueLimits:
        """Returns the bounds of what may wait."""
        return QueueLimits(self.max_queue_ms, self.max_queue_tokens, self.tenant_max_queue_tokens)

    @property
    def call_limits(self) -> CallLimits:
        """Returns the bounds of what is open and unanswered."""
        return CallLimits(
            self.max_calls, self.tenant_max_calls, self.tenant_max_waiting_ids, self.session_idle_ttl_s
        )

    def prefill_chunk(self, device: str) -> int:
        """Returns the size of a prompt's chunk, whose time a prompt adds to rounds of others, at worst twice. `device`
        is where the target runs."""
        return self.prefill_chunk_tokens or (256 if device.startswith("cuda") else 32)

    @property
    def draft_dir(self) -> Path | None:
        """Returns the draft's directory, None for a verifier without a draft."""
        if self.draft:
            return None if self.draft == "none" else Path(self.draft)
        is_embedded = self.target.resolve() == EMBEDDED_TARGET
        return EMBEDDED_DRAFT if is_embedded and EMBEDDED_DRAFT.is_dir() else None
