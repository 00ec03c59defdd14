"""Shapes answers as OpenAI does: complete ones, and the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outrider.common.types import FinishReason
from outrider.edge_client.core.events import EndEvent, MarkClearedEvent, SessionEvent, TokenEvent
from outrider.edge_client.daemon.openai.logprobs import chat_logprobs, completion_logprobs
from outrider.edge_client.daemon.openai.parsed import Kind, ParsedRequest
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer

_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",  # usage.outrider.finish_reason tells the two apart
}
_Object = dict[str, object]


class Shaper:
    """Makes the answer to one request out of its events. `fingerprint` is the target's, set once it is
    known."""

    def __init__(self, parsed: ParsedRequest, tokenizer: EdgeTokenizer, request_id: str, model: str) -> None:
        self.fingerprint: str | None = None
        self._parsed = parsed
        self._tokenizer = tokenizer
        self._id, self._model = request_id, model
        self._created = int(time.time())
        self._num_chars = 0  # of text in chunks so far

    @property
    def _is_chat(self) -> bool:
        return self._parsed.kind is Kind.CHAT

    # --------------------------------------------------------------------------------------- whole

    def whole(self, events: Sequence[SessionEvent], usage: _Object) -> _Object:
        """Returns the complete answer."""
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        text = "".join(event.text for event in events if isinstance(event, TokenEvent | EndEvent))
        finish = next(_FINISH.get(e.finish_reason) for e in reversed(events) if isinstance(e, EndEvent))
        if self._is_chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            choice: _Object = {"index": 0, "message": message}
        else:
            choice = {"index": 0, "text": text}
        choice |= {"logprobs": self._logprobs(tokens), "finish_reason": finish}
        name = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head(name), "choices": [choice], "usage": usage}

    # -------------------------------------------------------------------------------------- chunks

    def first_chunk(self) -> _Object | None:
        """Returns the chunk with the role that a chat's stream begins with; None for a completion."""
        if not self._is_chat:
            return None
        return self._chunk({"index": 0, "delta": {"role": "assistant", "content": ""}}, None, None)

    def chunks(
        self, events: Sequence[SessionEvent], live: _Object | None, warning: str = ""
    ) -> list[_Object]:
        """Returns the chunks for a batch of events: one where it shows something, and one for the end, with
        `warning` if there is one. `live` goes with the first where the request asked for tokens."""
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        cleared = [event.index for event in events if isinstance(event, MarkClearedEvent)]
        end = next((event for event in events if isinstance(event, EndEvent)), None)
        text = "".join(event.text for event in tokens) + (end.text if end else "")
        extras = self._extras(tokens, cleared, live) if self._parsed.has_tokens else None
        made = []
        if text or extras is not None or (tokens and self._parsed.num_top_logprobs is not None):
            made.append(self._chunk(self._delta(text), self._logprobs(tokens), None, extras))
        if end is not None:
            last = self._chunk(self._delta(""), None, _FINISH.get(end.finish_reason))
            made.append({**last, "outrider_warning": warning} if warning else last)
        self._num_chars += len(text)
        return made

    def usage_chunk(self, usage: _Object) -> _Object:
        """Returns the last chunk, which has the usage."""
        return {**self._head(self._chunk_name), "choices": [], "usage": usage}

    def _delta(self, text: str) -> _Object:
        if self._is_chat:
            return {"index": 0, "delta": {"content": text} if text else {}}
        return {"index": 0, "text": text}

    def _chunk(
        self, choice: _Object, logprobs: _Object | None, finish: str | None, extras: _Object | None = None
    ) -> _Object:
        choice = {**choice, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head(self._chunk_name), "choices": [choice]}
        if self._parsed.has_usage:
            chunk["usage"] = None  # as OpenAI's: only the last chunk has it
        if extras is not None:
            chunk["outrider"] = extras
        return chunk

    def _extras(
        self, tokens: Sequence[TokenEvent], cleared: Sequence[int], live: _Object | None
    ) -> _Object | None:
        if not tokens and not cleared:
            return None
        told = [
            {
                "index": event.index,
                "text": event.text,
                "origin": str(event.origin),
                "verified": event.is_verified,
                "approximate": event.approximation is not None,
            }
            for event in tokens
        ]
        return {"tokens": told, "cleared": list(cleared), "live": live}

    # -------------------------------------------------------------------------------------- common

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _head(self, name: str) -> _Object:
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self.fingerprint,
        }

    def _logprobs(self, tokens: Sequence[TokenEvent]) -> _Object | None:
        num_top = self._parsed.num_top_logprobs
        if num_top is None:
            return None
        if self._is_chat:
            return chat_logprobs(self._tokenizer, tokens, num_top)
        return completion_logprobs(self._tokenizer, tokens, num_top, self._num_chars)
