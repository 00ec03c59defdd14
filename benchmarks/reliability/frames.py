"""Frames of a client that means harm: honest requests of a session, mutated, repeated, out of order, or random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from outrider.common.codec.tables import METHOD_NUMBERS
from outrider.common.methods import sends_probs, sends_support, takes_trees
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.tree import ROOT, Tree
from outrider.common.types import Method

_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-46, 1e-3, 1e4, 3e38, float("inf"), float("-inf"), float("nan"))
_INTS = (0, 1, 2, 15, 16, 17, 31, 32, 35, 64, 255, 2**31 - 1)
_TEXTS = ("", "x", "\x00", "\x1b[2J", "\u202e", "\U0001f600", "n" * 300)
_MANY = 3000  # entries of a list that is far too long

_VALUES: dict[int, Callable[[random.Random], Any]] = {
    FieldDescriptor.CPPTYPE_BOOL: lambda rng: rng.random() < 0.5,
    FieldDescriptor.CPPTYPE_DOUBLE: lambda rng: rng.choice((*_FLOATS, rng.random())),
    FieldDescriptor.CPPTYPE_FLOAT: lambda rng: rng.choice((*_FLOATS, rng.random())),
    FieldDescriptor.CPPTYPE_ENUM: lambda rng: rng.choice((0, 1, 2, 3, 8, 9, 99)),
    FieldDescriptor.CPPTYPE_INT32: lambda rng: rng.choice((*_INTS, -1, -(2**31))),
    FieldDescriptor.CPPTYPE_INT64: lambda rng: rng.choice((*_INTS, -1, -(2**63))),
    FieldDescriptor.CPPTYPE_UINT32: lambda rng: rng.choice((*_INTS, 2**32 - 1, rng.getrandbits(32))),
    FieldDescriptor.CPPTYPE_UINT64: lambda rng: rng.choice((*_INTS, 2**64 - 1, rng.getrandbits(64))),
}


def mutate(message: Message, rng: random.Random) -> None:
    """Changes one field of `message`, or of a message in it, to a value that may not be valid."""
    each = rng.choice(message.DESCRIPTOR.fields)
    if each.is_repeated:
        _mutate_list(getattr(message, each.name), each, rng)
    elif each.message_type is None:
        setattr(message, each.name, _value(each, rng))
    elif each.containing_oneof is None or message.HasField(each.name) or rng.random() < 0.1:
        child = getattr(message, each.name)
        child.SetInParent()
        if child.DESCRIPTOR.fields:
            mutate(child, rng)


def _mutate_list(values: Any, each: FieldDescriptor, rng: random.Random) -> None:
    what = rng.choice(("drop", "shuffle", "many", "add", "add", "change", "change"))
    if what == "drop":
        del values[rng.randint(0, len(values)) :]
    elif what == "shuffle":
        copies = list(values)
        del values[:]
        values.extend(rng.sample(copies, len(copies)))
    elif each.message_type is not None:
        mutate(rng.choice(values) if values and what == "change" else values.add(), rng)
    elif what == "change" and values:
        values[rng.randrange(len(values))] = _value(each, rng)
    else:
        values.extend(_value(each, rng) for _ in range(_MANY if rng.random() < 0.02 else rng.randint(1, 3)))


def _value(each: FieldDescriptor, rng: random.Random) -> Any:
    if each.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 8, 15, 16, 17, 200)))
    if each.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(_TEXTS)
    return _VALUES[each.cpp_type](rng)


@dataclass(eq=False)
class FrameSource:
    """Makes the `SessionRequest` frames of one client with one session id. `hear` lets the honest ones among
    them build on the verifier's answers; equal seeds and answers give equal frames."""

    rng: random.Random
    session_id: bytes
    num_tokens: int  # of the target's vocabulary
    max_context: int
    methods: tuple[Method, ...] = tuple(Method)
    draft_sources: tuple[str, ...] = ("",)
    is_open: bool = False
    _method: Method = Method.COUPLED
    _round_id: int = 0
    _position: int = 0
    _hash: int = 0
    _sent: list[bytes] = field(default_factory=list)  # the last few, to be sent again

    def next(self) -> list[bytes]:
        """Returns the next frames: mostly one."""
        rng, frame = self.rng, self._honest()
        match rng.choices(
            ("honest", "mutated", "again", "swapped", "broken", "random"), (40, 36, 8, 8, 5, 3)
        )[0]:
            case "mutated":
                for _ in range(rng.choice((1, 1, 1, 2, 5))):
                    mutate(getattr(frame, frame.WhichOneof("body") or "verify"), rng)
                frames = [frame.SerializeToString()]
            case "again":
                frames = [frame.SerializeToString(), rng.choice(self._sent or [b""])]
            case "swapped":
                frames = [self._honest().SerializeToString(), frame.SerializeToString()]
            case "broken":
                frames = [_break(frame.SerializeToString(), rng)]
            case "random":
                frames = [rng.randbytes(rng.choice((0, 1, 2, 8, 64, 1000)))]
            case _:
                frames = [frame.SerializeToString()]
        self._sent = [*self._sent[-15:], *frames]
        return frames

    def hear(self, reply: pb.SessionResponse) -> None:
        """Takes an answer in: the next honest frame builds on the position and hash in it."""
        body = reply.WhichOneof("body")
        if body in ("open", "verify", "generate"):
            kind = getattr(reply, body).WhichOneof("body")
            found: Any = getattr(getattr(reply, body), kind) if kind else None
            if kind in ("opened", "verdict", "tokens"):
                self.is_open, self._position, self._hash = True, found.position, found.hash
            elif kind == "error":
                lost = (pb.ROUND_ERROR_CODE_UNKNOWN_SESSION, pb.ROUND_ERROR_CODE_INTERNAL)
                self.is_open = self.is_open and found.code not in lost
                if found.code == pb.ROUND_ERROR_CODE_UNKNOWN_PREFIX:
                    self._position, self._hash = found.position, found.hash
        elif body == "close":
            self.is_open = False

    # ------------------------------------------------------------------------------- honest requests

    def _honest(self) -> pb.SessionRequest:
        rng = self.rng
        self._round_id += 1
        is_full = self._position + 20 > self.max_context
        if not self.is_open or is_full or rng.random() < 0.04:
            return pb.SessionRequest(open=self._open())
        kind = rng.choices(("verify", "generate", "cancel", "close"), (80, 12, 5, 3))[0]
        if kind == "verify":
            return pb.SessionRequest(verify=self._verify())
        if kind == "cancel":
            return pb.SessionRequest(cancel=pb.CancelRequest(round_id=self._round_id - 1))
        if kind == "close":
            return pb.SessionRequest(close=pb.CloseRequest())
        generate = pb.GenerateRequest(
            round_id=self._round_id,
            base_position=self._position,
            base_hash=self._hash,
            max_new_tokens=rng.randint(1, 8),
            mode=rng.choice((pb.GENERATE_MODE_CLOUD_ONLY, pb.GENERATE_MODE_CO_LOCATED)),
            num_speculative_tokens=rng.randint(0, 6),
        )
        return pb.SessionRequest(generate=generate)

    def _open(self) -> pb.OpenRequest:
        rng, token_ids = self.rng, self._ids(1, 8)
        self._method = rng.choice(self.methods)
        sampling = pb.SamplingParams(temperature=rng.choice((0.0, 0.7, 1.0)), seed=rng.getrandbits(64))
        if rng.random() < 0.3:
            sampling.repetition_penalty, sampling.top_p, sampling.top_k = 1.1, 0.9, 8
            sampling.bad_words.add(token_ids=self._ids(1, 3))
            sampling.logit_bias.add(token_id=self._ids(1, 1)[0], bias=2.0)
        return pb.OpenRequest(
            session_id=self.session_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            method=METHOD_NUMBERS[self._method],
            num_logprobs=rng.choice((0, 0, 3)),
            round_id=self._round_id,
            draft_source=rng.choice(self.draft_sources),
        )

    def _verify(self) -> pb.VerifyRequest:
        rng, drafted = self.rng, self._ids(0, 5)
        request = pb.VerifyRequest(
            round_id=self._round_id,
            base_position=self._position,
            base_hash=self._hash,
            draft_tokens=drafted,
            pipelined=rng.random() < 0.1,
            deadline_ms=rng.choice((0, 0, 1, 1000)),
        )
        if takes_trees(self._method) and rng.random() < 0.4:
            request.parents.extend(rng.randint(ROOT, node - 1) for node in range(len(drafted)))
        if sends_probs(self._method):
            request.q_token_probs.extend(rng.uniform(0.01, 1.0) for _ in drafted)
        if sends_support(self._method):
            tree = Tree(request.parents or range(ROOT, len(drafted) - 1))
            for node in tree.internal:
                children = (drafted[child] for child in tree.children(node))
                ids = list(dict.fromkeys((*children, *self._ids(0, 4))))
                request.q_support.add(token_ids=ids, weights=[rng.randint(1, 99) for _ in ids])
        if rng.random() < 0.1:
            request.committed_tokens.extend(self._ids(1, 2))
        return request

    def _ids(self, least: int, most: int) -> list[int]:
        return [self.rng.randrange(self.num_tokens) for _ in range(self.rng.randint(least, most))]


def _break(data: bytes, rng: random.Random) -> bytes:
    """Returns the bytes with some changed, cut or repeated."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    start = rng.randint(0, len(changed))
    return bytes(rng.choice((changed, changed[:start], changed + changed[start:])))
