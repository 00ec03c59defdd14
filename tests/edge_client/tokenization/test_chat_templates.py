"""Chat templates as models bring them, in a sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.common.errors import ModelError, UsageError
from outrider.edge_client.tokenization.chat_template import (
    ChatTemplate,
    TemplateRefusedError,
    load_chat_template,
)

MESSAGES = [{"role": "user", "content": "hé <b>"}]


def render(source: str, **special: str) -> str:
    return ChatTemplate(source, "here", special).render(MESSAGES)


def test_variables_and_helpers_are_those_of_transformers() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}|{{ messages | tojson }}{% endif %}{{ tools is none }}"
    )
    told = json.dumps(MESSAGES, ensure_ascii=False)
    assert render(source, bos_token="<s>") == f"<s>hé <b>|{told}True"
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("{% for m in messages %}\n  {{ m.role }}\n{% endfor %}\n") == "  user\n"


def test_it_gives_what_transformers_gives(tmp_path: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{{- bos_token }}\n{%- for message in messages %}\n    {%- if message.role == 'user' %}\n"
        "{{ '[INST] ' + message.content | trim + ' [/INST]' }}\n    {%- else %}\n"
        "{{ message | tojson(indent=2) }}\n    {%- endif %}\n{%- endfor %}\n"
    )
    messages = [*MESSAGES, {"role": "assistant", "content": "ja"}]
    theirs, _ = render_jinja_template([messages], chat_template=source, bos_token="<s>")
    assert ChatTemplate(source, "here", {"bos_token": "<s>"}).render(messages) == theirs[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_that_refuses_or_breaks_out_is_an_error_that_says_so(source: str) -> None:
    with pytest.raises(TemplateRefusedError, match="chat template refuses"):
        render(source)


def test_it_is_found_beside_the_draft_and_the_file_of_its_own_wins(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "old"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    found = load_chat_template(tmp_path)
    assert found and found.source == "old"
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_chat_template(tmp_path).source == "d"  # type: ignore[union-attr]
    (tmp_path / "chat_template.jinja").write_text("new")
    assert load_chat_template(tmp_path).source == "new"  # type: ignore[union-attr]
    (tmp_path / "mine.jinja").write_text("mine")
    assert load_chat_template(tmp_path, str(tmp_path / "mine.jinja")).source == "mine"  # type: ignore[union-attr]


def test_a_file_that_is_missing_or_no_jinja_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--chat-template .*none.jinja"):
        load_chat_template(tmp_path, str(tmp_path / "none.jinja"))
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelError, match=r"chat_template.jinja holds .* not Jinja"):
        load_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template.jinja cannot be read: 'utf-8'"):
        load_chat_template(tmp_path)


@pytest.mark.parametrize("is_listed", [True, False], ids=["in the configuration", "in files"])
def test_a_template_for_tools_is_used_with_tools_alone(tmp_path: Path, is_listed: bool) -> None:
    plain, for_tools = "plain", "{{ tools | length }} tools"
    if is_listed:
        named = {"default": plain, "tool_use": for_tools}
        listed = [{"name": name, "template": source} for name, source in named.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    else:
        (tmp_path / "chat_template.jinja").write_text(plain)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(for_tools)
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == template.render(MESSAGES, []) == "plain"
    assert template.render(MESSAGES, [{"type": "function"}]) == "1 tools"


THINKS = "{% if enable_thinking is defined and not enable_thinking %}no{% else %}a{% endif %} thought"


def test_variables_of_its_own_are_given_by_name(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(THINKS)
    usual, silent = (load_chat_template(tmp_path, "", given) for given in ("", '{"enable_thinking": false}'))
    assert usual is not None and silent is not None
    assert usual.render(MESSAGES) == "a thought" and silent.render(MESSAGES) == "no thought"
    assert usual.render(MESSAGES, None, {"enable_thinking": False}) == "no thought"
    assert silent.render(MESSAGES, None, {"enable_thinking": True}) == "a thought"


@pytest.mark.parametrize(
    ("given", "word"),
    [("{", "not JSON"), ("[1]", "not a JSON object"), ('{"messages": []}', "messages is always given")],
)
def test_variables_that_no_template_may_have_chosen_are_named(tmp_path: Path, given: str, word: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(THINKS)
    with pytest.raises(UsageError, match=f"--chat-template-kwargs: .*{word}"):
        load_chat_template(tmp_path, "", given)
