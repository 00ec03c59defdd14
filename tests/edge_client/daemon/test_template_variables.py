"""`chat_template_kwargs`: a request sets variables of the chat template, as with vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from support.daemon.daemons import CHATML, running_daemon

from outrider.cloud_verifier.server.server import VerifierServer

# As in Qwen3's template, an empty thought at the beginning of the answer switches thinking off.
TEMPLATE = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
USER: Any = {"role": "user", "content": "Write a function."}


def num_prompt_tokens(client: openai.OpenAI, **fields: object) -> int:
    answer = client.chat.completions.create(
        model="outrider", messages=[USER], max_tokens=1, extra_body=fields
    )
    assert answer.usage is not None
    return answer.usage.prompt_tokens


@pytest.mark.parametrize("default", ["", '{"enable_thinking": false}'])
def test_a_request_sets_variables_of_the_template_and_the_daemon_their_defaults(
    verifier: VerifierServer, tmp_path: Path, default: str
) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    flags = ("--chat-template", str(path), "--chat-template-kwargs", default)
    with (
        running_daemon(f"127.0.0.1:{verifier.port}", *flags) as daemon,
        openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        thinking = num_prompt_tokens(client, chat_template_kwargs=ON)
        silent = num_prompt_tokens(client, chat_template_kwargs=OFF)
        assert silent > thinking
        assert num_prompt_tokens(client) == (silent if default else thinking)
        for name in ("messages", "add_generation_prompt", "eos_token"):
            with pytest.raises(openai.BadRequestError) as caught:
                num_prompt_tokens(client, chat_template_kwargs={name: "x"})
            assert caught.value.param == f"chat_template_kwargs.{name}"
