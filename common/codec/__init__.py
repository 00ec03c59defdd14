"""Dataclasses to protobuf and back: the only place where the two meet.

Encoding trusts our own dataclasses. Decoding trusts nothing: whatever a single message shows to be wrong
(lengths that disagree, probabilities out of range, unknown enum values) raises `InvalidFieldError` naming the
field as in docs/protocol.md. Checks that need the model or the session are the verifier's
(`outrider.cloud_verifier.engine.validation`).
"""

from outrider.common.codec.requests_in import (
    decode_close,
    decode_generate,
    decode_open,
    decode_request,
    decode_verify,
    parse,
)
from outrider.common.codec.requests_out import (
    encode_close,
    encode_generate,
    encode_open,
    encode_request,
    encode_verify,
)
from outrider.common.codec.responses_in import (
    decode_closed,
    decode_generate_response,
    decode_model_info,
    decode_open_response,
    decode_response,
    decode_verify_response,
)
from outrider.common.codec.responses_out import (
    encode_closed,
    encode_generate_response,
    encode_model_info,
    encode_open_response,
    encode_refusal,
    encode_response,
    encode_verify_response,
)
from outrider.common.codec.tables import GenerateReply, OpenReply, VerifyReply

__all__ = [
    "GenerateReply",
    "OpenReply",
    "VerifyReply",
    "decode_close",
    "decode_closed",
    "decode_generate",
    "decode_generate_response",
    "decode_model_info",
    "decode_open",
    "decode_open_response",
    "decode_request",
    "decode_response",
    "decode_verify",
    "decode_verify_response",
    "encode_close",
    "encode_closed",
    "encode_generate",
    "encode_generate_response",
    "encode_model_info",
    "encode_open",
    "encode_open_response",
    "encode_refusal",
    "encode_request",
    "encode_response",
    "encode_verify",
    "encode_verify_response",
    "parse",
]
