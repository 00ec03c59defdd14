"""Makes the settings that a chat with tools needs: a grammar, and the text of special tokens."""

from __future__ import annotations

import json

from outrider.edge_client.daemon.openai.errors import invalid
from outrider.edge_client.daemon.openai.parsed import ParsedRequest
from outrider.edge_client.daemon.tools.families import ToolFamily
from outrider.edge_client.daemon.tools.grammar import tool_grammar
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer


def tool_changes(family: ToolFamily, parsed: ParsedRequest, tokenizer: EdgeTokenizer) -> dict[str, object]:
    """Returns settings of `RunConfig`, by key. A regular expression or Lark grammar of the request is one of the whole
    answer, calls included. Raises `ApiError` where such a grammar meets a demand for calls."""
    use, given = parsed.tool_use, parsed.changes
    assert use is not None, "a request with tools"
    changes: dict[str, object] = {}
    opening_id = tokenizer.token_id(family.opening)
    if opening_id is not None and tokenizer.is_special(opening_id):
        changes["show_special_tokens"] = True
    schema = given.get("json_schema")
    if parsed.grammar_param and (schema is None or use.is_forced):
        if use.is_forced:
            raise invalid(parsed.grammar_param, "does not go with a tool_choice that demands a call")
        return changes
    if use.is_forced or schema is not None or any(tool.is_strict for tool in use.callable):
        answer_schema = json.loads(schema) if schema is not None else None
        has_whitespace = bool(given.get("json_whitespace"))
        changes["grammar"] = tool_grammar(family, use, tokenizer.token_id, answer_schema, has_whitespace)
        changes |= {"json_schema": "", "json_whitespace": False} if schema is not None else {}
    return changes
