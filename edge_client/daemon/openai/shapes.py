"""Shapes answers as OpenAI does: complete ones, and the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from outrider.common.types import FinishReason, TokenLogprobs
from outrider.edge_client.core.events import EndEvent, MarkClearedEvent, SessionEvent, TokenEvent
from outrider.edge_client.daemon.openai.choices import Choice
from outrider.edge_client.daemon.openai.logprobs import (
    ScoredToken,
    chat_logprobs,
    completion_logprobs,
    scored,
    scored_prompt,
)
from outrider.edge_client.daemon.openai.parsed import Kind, ParsedRequest
from outrider.edge_client.daemon.tools.families import ToolFamily
from outrider.edge_client.daemon.tools.reader import CallDelta, CallReader, Delta, TextDelta
from outrider.edge_client.daemon.tools.request import ToolChoice
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer

_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",  # usage.outrider.finish_reason tells the two apart
}
_Object = dict[str, object]


class AnswerHead:
    """Makes what all parts of one answer begin with. `fingerprint` is the target's, set once it is known."""

    def __init__(self, parsed: ParsedRequest, request_id: str, model: str) -> None:
        self.fingerprint: str | None = None
        self._name = "chat.completion" if parsed.kind is Kind.CHAT else "text_completion"
        self._has_usage = parsed.has_usage
        self._id, self._model = request_id, model
        self._created = int(time.time())

    def whole(self, choices: Sequence[_Object], usage: _Object) -> _Object:
        """Returns the complete answer."""
        return {**self._head(self._name), "choices": list(choices), "usage": usage}

    def chunk(self, choice: _Object) -> _Object:
        """Returns one chunk of a stream."""
        chunk = {**self._head(self._chunk_name), "choices": [choice]}
        if self._has_usage:
            chunk["usage"] = None  # as OpenAI's: only the last chunk has it
        return chunk

    def usage_chunk(self, usage: _Object) -> _Object:
        """Returns the last chunk, which has the usage."""
        return {**self._head(self._chunk_name), "choices": [], "usage": usage}

    @property
    def _chunk_name(self) -> str:
        return f"{self._name}.chunk" if self._name == "chat.completion" else self._name

    def _head(self, name: str) -> _Object:
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self.fingerprint,
        }


class Shaper:
    """Makes one choice of an answer out of its events. `family` is how the template has tools called."""

    def __init__(
        self,
        parsed: ParsedRequest,
        tokenizer: EdgeTokenizer,
        head: AnswerHead,
        choice: Choice,
        family: ToolFamily | None,
        prompt_logprobs: Sequence[TokenLogprobs | None] = (),
    ) -> None:
        self._parsed, self._tokenizer, self._head, self._choice = parsed, tokenizer, head, choice
        self._prompt: list[ScoredToken] = []
        if parsed.scores_prompt:
            is_text = isinstance(parsed.prompts[choice.index // parsed.num_choices], str)
            self._prompt = scored_prompt(
                tokenizer, choice.prompt_ids, prompt_logprobs, choice.echo, has_special_tokens=not is_text
            )
        self._num_chars = len(choice.echo)  # that tokens so far decoded to
        self._calls: CallReader | None = None
        if (use := parsed.tool_use) is not None:
            assert family is not None, "requests with tools are refused without one"
            names = [tool.name for tool in use.callable]
            self._calls = CallReader(family, names, use.max_calls(family.max_calls), use.is_forced)

    @property
    def _is_chat(self) -> bool:
        return self._parsed.kind is Kind.CHAT

    # --------------------------------------------------------------------------------------- whole

    def whole(self, events: Sequence[SessionEvent]) -> _Object:
        """Returns the complete choice."""
        tokens = self._tokens(events)
        end = next(event for event in reversed(events) if isinstance(event, EndEvent))
        text = self._text(tokens, end)
        deltas = self._split(text, is_end=True)
        if self._is_chat:
            choice: _Object = {"message": _message(deltas)}
        else:
            choice = {"text": self._choice.echo + text}
        about = {"logprobs": self._logprobs(tokens, self._prompt), "finish_reason": self._finish(end)}
        return {"index": self._choice.index, **choice, **about}

    # -------------------------------------------------------------------------------------- chunks

    def first_chunk(self) -> _Object | None:
        """Returns the chunk that a choice's stream begins with: a chat's role, a completion's echo, if any."""
        if self._is_chat:
            return self._chunk({"delta": {"role": "assistant", "content": ""}}, None, None)
        if not self._choice.echo:
            return None
        return self._chunk({"text": self._choice.echo}, self._logprobs((), self._prompt), None)

    def chunks(
        self, events: Sequence[SessionEvent], live: _Object | None, warning: str = ""
    ) -> list[_Object]:
        """Returns the chunks for a batch of events: those that show something, and one for the end, with
        `warning` if there is one. `live` goes with the first where the request asked for tokens."""
        tokens = self._tokens(events)
        cleared = [event.index for event in events if isinstance(event, MarkClearedEvent)]
        end = next((event for event in events if isinstance(event, EndEvent)), None)
        text = self._text(tokens, end)
        extras = self._extras(tokens, cleared, live) if self._parsed.has_tokens else None
        deltas: list[Delta] = self._split(text, end is not None)
        if not deltas and (extras is not None or (tokens and self._parsed.num_top_logprobs is not None)):
            deltas = [TextDelta("")]
        made: list[_Object] = []
        for delta in deltas:
            is_first = not made
            logprobs = self._logprobs(tokens) if is_first else None
            made.append(self._chunk(self._delta(delta), logprobs, None, extras if is_first else None))
        if end is not None:
            last = self._chunk(self._delta(TextDelta("")), None, self._finish(end))
            made.append({**last, "outrider_warning": warning} if warning else last)
        self._num_chars += sum(token.num_chars for token in tokens)
        return made

    def _tokens(self, events: Sequence[SessionEvent]) -> list[TokenEvent]:
        shown = () if self._parsed.is_prompt_only else events
        return [event for event in shown if isinstance(event, TokenEvent)]

    def _text(self, tokens: Sequence[TokenEvent], end: EndEvent | None) -> str:
        is_shown = end is not None and not self._parsed.is_prompt_only
        return "".join(token.text for token in tokens) + (end.text if end and is_shown else "")

    def _split(self, text: str, is_end: bool) -> list[Delta]:
        if self._calls is None:
            return [TextDelta(text)] if text else []
        return self._calls.feed(text) + (self._calls.end() if is_end else [])

    def _delta(self, delta: Delta) -> _Object:
        if isinstance(delta, CallDelta):
            return {"delta": {"tool_calls": [{"index": delta.index, **_call(delta)}]}}
        if self._is_chat:
            return {"delta": {"content": delta.text} if delta.text else {}}
        return {"text": delta.text}

    def _chunk(
        self, choice: _Object, logprobs: _Object | None, finish: str | None, extras: _Object | None = None
    ) -> _Object:
        about = {"logprobs": logprobs, "finish_reason": finish}
        chunk = self._head.chunk({"index": self._choice.index, **choice, **about})
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

    def _finish(self, end: EndEvent) -> str | None:
        """Returns the finish reason: `tool_calls` of a text that ended with calls of the model's own choice."""
        reason = "length" if self._parsed.is_prompt_only else _FINISH.get(end.finish_reason)
        use = self._parsed.tool_use
        is_called = self._calls is not None and self._calls.num_calls > 0
        if reason == "stop" and is_called and use is not None and use.choice is not ToolChoice.NAMED:
            return "tool_calls"
        return reason

    def _logprobs(self, tokens: Sequence[TokenEvent], prompt: Sequence[ScoredToken] = ()) -> _Object | None:
        num_top = self._parsed.num_top_logprobs
        if num_top is None:
            return None
        if self._is_chat:
            return chat_logprobs(self._tokenizer, tokens, num_top)
        num_chars = 0 if prompt else self._num_chars
        return completion_logprobs(self._tokenizer, [*prompt, *scored(tokens)], num_top, num_chars)


def _message(deltas: Sequence[Delta]) -> _Object:
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    calls: list[CallDelta] = []
    for delta in deltas:
        if isinstance(delta, CallDelta):
            if delta.call_id:
                calls.append(delta)
            else:
                calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + delta.arguments)
    message: _Object = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    return {**message, "tool_calls": [_call(call) for call in calls]} if calls else message


def _call(delta: CallDelta) -> _Object:
    if not delta.call_id:
        return {"function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"id": delta.call_id, "type": "function", "function": function}
