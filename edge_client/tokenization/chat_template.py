"""Renders messages with a model's chat template, in Hugging Face's form of Jinja.

A template comes with a model and is untrusted code: it runs in Jinja's immutable sandbox, with the variables
and helpers that `transformers.apply_chat_template` passes and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from outrider.common.errors import ModelError, UsageError

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
# Variables and helpers that every template is given; nobody may choose others.
_GIVEN = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")
)
Message = Mapping[str, object]


class TemplateRefusedError(UsageError):
    """Raised where the template rejects these messages by `raise_exception`, or fails on them."""


@dataclass(frozen=True)
class ChatTemplate:
    """Holds a template. `source` is Jinja, `origin` the file it came from; `special_tokens` are variables in
    it. `for_tools` is another that is used with tools, where the model has one. `variables` are values for variables
    of the template's own, such as `enable_thinking`."""

    source: str
    origin: str
    special_tokens: Mapping[str, str]
    for_tools: ChatTemplate | None = None
    variables: Mapping[str, object] = field(default_factory=dict)

    @property
    def reserved_names(self) -> frozenset[str]:
        """Returns the names of variables that every template is given, and that nobody chooses."""
        return _GIVEN | self.special_tokens.keys()

    def check(self) -> None:
        """Raises `ModelError` where the template is not Jinja."""
        _ = self._compiled
        if self.for_tools is not None:
            self.for_tools.check()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Returns the prompt for the assistant's next message, which may call `tools`. `variables`, none of them of
        the `reserved_names`, go before the template's own `variables`. Raises `TemplateRefusedError`."""
        template = (self.for_tools or self)._compiled if tools else self._compiled
        given = {
            **self.variables,
            **(variables or {}),
            **self.special_tokens,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            text: str = template.render(given)
        except Exception as error:  # somebody else's code, which can fail in any way
            raise TemplateRefusedError(f"the chat template refuses these messages: {error}") from error
        return text

    @cached_property
    def _compiled(self) -> Any:
        """Returns the compiled template, cached since compiling takes longer than rendering. Threads may
        render at once."""
        import jinja2

        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise ModelError(f"{self.origin} holds a chat template that is not Jinja: {error}") from error


def load_chat_template(directory: Path, override: str = "", variables: str = "") -> ChatTemplate | None:
    """Returns the template of the file `override`, else of chat_template.jinja or tokenizer_config.json in
    `directory`; None where there is none. `variables` is a JSON object of values for the template's variables.
    Raises `UsageError` for an `override` that cannot be read and for `variables` that are not such an object,
    `ModelError` for a template that is damaged."""
    read_variables = _read_variables(variables)
    if override:
        path = Path(override)
        try:
            source = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"--chat-template {override}: cannot read it: {error.strerror or error}"
            ) from error
        except UnicodeDecodeError as error:
            raise UsageError(f"--chat-template {override}: is not UTF-8") from error
        template = ChatTemplate(source, str(path), _special_tokens(_read_config(directory)))
    else:
        found = _find(directory)
        if found is None:
            return None
        template = found
    if reserved := sorted(template.reserved_names & read_variables.keys()):
        raise UsageError(
            f"--chat-template-kwargs: {reserved[0]} is always given; name variables of the template's own"
        )
    template = replace(template, variables=read_variables)
    template.check()
    return template


def _read_variables(given: str) -> dict[str, object]:
    try:
        variables = json.loads(given or "{}")
    except ValueError as error:
        raise UsageError(f"--chat-template-kwargs: {given!r} is not JSON: {error}") from error
    if not isinstance(variables, dict):
        raise UsageError(f'--chat-template-kwargs: {given!r} is not a JSON object, such as {{"name": false}}')
    return variables


def _find(directory: Path) -> ChatTemplate | None:
    config = _read_config(directory)
    special_tokens = _special_tokens(config)
    path, tool_path, config_path = (
        directory / name for name in (TEMPLATE_FILE, TOOL_TEMPLATE_FILE, CONFIG_FILE)
    )
    if path.is_file():
        named = {"default": (_read_source(path), path)}
        if tool_path.is_file():
            named["tool_use"] = (_read_source(tool_path), tool_path)
    else:
        named = {name: (source, config_path) for name, source in _named(config.get("chat_template")).items()}
    if "default" not in named:
        return None
    made = {
        name: ChatTemplate(source, str(origin), special_tokens) for name, (source, origin) in named.items()
    }
    return replace(made["default"], for_tools=made.get("tool_use"))


def _read_source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _named(given: object) -> dict[str, str]:
    """Returns a configuration's templates by name; one alone is the default."""
    if isinstance(given, list):
        pairs = [(each.get("name"), each.get("template")) for each in given if isinstance(each, dict)]
    else:
        pairs = [("default", given)]
    return {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns bos_token, eos_token and so on, each given as text or as an object that holds it."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _environment() -> Any:
    """Returns the same environment that transformers makes, so that a template renders the same text."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here it is its content."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own class attribute

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller: Any) -> str:
            text: str = caller()
            return text

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
