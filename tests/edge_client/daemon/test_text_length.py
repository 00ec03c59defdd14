"""How long a text becomes where a request gives no limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.daemon.daemons import running_daemon
from support.matrices import one_of
from support.processes.pairs import EMBEDDED
from support.processes.server import serving

from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.config import ServeConfig

CONTEXT = 320
USER: Any = {"role": "user", "content": "Write a function."}
ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def small() -> Iterator[openai.OpenAI]:
    """A daemon whose verifier takes short sessions."""
    with (
        serving(load_target(EMBEDDED / "target"), ServeConfig(session_max_tokens=CONTEXT)) as server,
        running_daemon(f"127.0.0.1:{server.port}") as daemon,
        openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def test_the_model_names_its_target_and_its_context_as_vllm_does(small: openai.OpenAI) -> None:
    (model,) = small.models.list().data
    assert model.model_extra is not None and model.model_extra["max_model_len"] == CONTEXT
    assert model.model_extra["root"] == model.model_extra["outrider"]["target"] == "target"


@pytest.mark.parametrize(
    ("limit", "mode"), one_of(2, [{}, {"max_tokens": -1}], ["auto", "speculative", "cloud-only"]), ids=str
)
def test_a_chat_without_a_limit_goes_on_until_the_context_is_full(
    small: openai.OpenAI, limit: dict[str, Any], mode: str
) -> None:
    body = ENDLESS | {"outrider": {"mode": mode}}
    answer = small.chat.completions.create(
        model="outrider", messages=[USER], seed=1, extra_body=body, **limit
    )
    assert answer.usage is not None and answer.usage.total_tokens == CONTEXT
    assert answer.usage.completion_tokens > 256
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.model_extra["outrider"]["finish_reason"] == "context"  # type: ignore[index]


def test_a_completion_without_a_limit_has_the_sixteen_tokens_of_openai(small: openai.OpenAI) -> None:
    answer = small.completions.create(model="outrider", prompt="x = ", seed=1, extra_body=ENDLESS)
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_a_completion_of_minus_one_tokens_has_no_limit(small: openai.OpenAI) -> None:
    answer = small.completions.create(
        model="outrider", prompt="x = ", seed=1, extra_body=ENDLESS | {"n_predict": -1}
    )
    assert answer.usage is not None and answer.usage.total_tokens == CONTEXT
