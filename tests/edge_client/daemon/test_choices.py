"""Several texts of one request: `n`, several prompts, `echo`; whole and streamed."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from support.daemon.daemons import DaemonProcess, running_daemon, wait_until

from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common.config.loader import with_values
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.daemon.http.prompt_scores import PromptScores
from outrider.edge_client.daemon.openai.choices import Plan, choice_seed, make_choices
from outrider.edge_client.session.factory import create_link
from outrider.edge_client.session.scoring import TextScoring
from outrider.edge_client.transport.connection import CancelledByUser

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return"


def complete(client: openai.OpenAI, prompt: object, **fields: Any) -> Any:
    common = {"model": "outrider", "max_tokens": 12, "seed": 11}
    return client.completions.create(prompt=prompt, **{**common, **fields})


def test_choices_have_seeds_of_their_own_and_say_which(client: openai.OpenAI) -> None:
    answer = complete(client, PROMPT, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    about = answer.usage.outrider["choices"]
    seeds = [each["seed"] for each in about]
    assert seeds[0] == 11 and len(set(seeds)) == 3
    num_new = 0
    for choice, seed in zip(answer.choices, seeds, strict=True):
        alone = complete(client, PROMPT, seed=seed)
        assert alone.choices[0].text == choice.text
        num_new += alone.usage.completion_tokens
    assert answer.usage.completion_tokens == num_new
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens, "the prompt is counted once"


def test_streamed_choices_are_the_same_and_end_each_by_itself(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Write a line."}]
    fields: Any = {
        "model": "outrider",
        "messages": messages,
        "max_tokens": 24,
        "seed": 3,
        "n": 3,
        "stop": ["e"],
    }
    whole = client.chat.completions.create(**fields)
    texts, ends = ["", "", ""], [""] * 3
    for chunk in client.chat.completions.create(**fields, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        assert not ends[choice.index], "nothing follows a choice's end"
        ends[choice.index] = choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert all("e" not in text for text in texts) and len(set(texts)) > 1


def test_several_prompts_are_answered_in_order_each_with_the_seed(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "x = ", [5, 6, 7]]
    answer = complete(client, prompts, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for index, prompt in enumerate(prompts):
        assert answer.choices[2 * index].text == complete(client, prompt).choices[0].text


def test_choices_share_what_the_verifier_has_read(verifier: VerifierServer) -> None:
    prompt = [1 + index % 500 for index in range(200)]
    with running_daemon(f"127.0.0.1:{verifier.port}", "--draft-cache-mb", "0") as process:
        observer = verifier.engine.observer
        before = observer.num_hit_tokens
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none") as client:
            complete(client, prompt, n=3)
            # The draft is unknown: each compares it in the last places of its own prompt, a block of which is read.
            assert observer.num_hit_tokens - before >= 2 * (192 - 16)
            # Texts that teach enough of it, on a busy machine too, where drafts are short or left to the target.
            for _ in range(3):
                complete(client, PROMPT, max_tokens=64, extra_body={"outrider": {"mode": "speculative"}})
            before = observer.num_hit_tokens
            complete(client, prompt[::-1], n=3)
        assert observer.num_hit_tokens - before >= 2 * 192


def test_echo_gives_the_prompt_back_before_the_text(client: openai.OpenAI) -> None:
    text = complete(client, PROMPT).choices[0].text
    assert complete(client, PROMPT, echo=True).choices[0].text == PROMPT + text
    ids = [5, 6, 7]
    echoed = complete(client, ids, echo=True).choices[0].text
    assert echoed.endswith(complete(client, ids).choices[0].text) and echoed != text
    pieces = [chunk.choices[0].text for chunk in complete(client, PROMPT, echo=True, stream=True)]
    assert pieces[0] == PROMPT and "".join(pieces) == PROMPT + text


def test_echo_with_logprobs_scores_the_prompt_as_a_text_would_be(client: openai.OpenAI) -> None:
    ids = [int(each) for each in np.random.default_rng(0).integers(1, 8000, 70)]  # more than a round drafts
    ids[20:40] = [5] * 20
    scored = complete(client, ids, echo=True, logprobs=2, max_tokens=0)
    found = scored.choices[0].logprobs
    assert scored.usage.completion_tokens == 0 and scored.choices[0].finish_reason == "length"
    assert len(found.tokens) == 70 and found.token_logprobs[0] is None and found.text_offset[0] == 0
    num_seen = 0
    for index in range(1, 70, 3):
        known = complete(client, ids[:index], logprobs=20, max_tokens=1).choices[0].logprobs
        assert len(found.top_logprobs[index]) == 2
        for token, logprob in found.top_logprobs[index].items():
            assert known.top_logprobs[0][token] == pytest.approx(logprob, abs=2e-3)
        if (logprob := known.top_logprobs[0].get(found.tokens[index])) is not None:
            assert found.token_logprobs[index] == pytest.approx(logprob, abs=2e-3)
            num_seen += 1
    assert num_seen >= 3, "tokens that the target finds likely are among them"
    streamed = list(complete(client, ids, echo=True, logprobs=2, max_tokens=3, stream=True))
    lists = [chunk.choices[0].logprobs.token_logprobs for chunk in streamed if chunk.choices[0].logprobs]
    whole = complete(client, ids, echo=True, logprobs=2, max_tokens=3).choices[0].logprobs
    assert [each for part in lists for each in part] == whole.token_logprobs
    assert whole.text_offset == sorted(whole.text_offset) and len(whole.tokens) == 73


def test_offsets_count_the_echos_special_tokens_and_are_the_same_streamed(client: openai.OpenAI) -> None:
    ids = [0, 200, 0, 201, 202]  # 0 ends texts: the echo has its name
    fields: Any = {"echo": True, "logprobs": 1, "max_tokens": 3}
    whole = complete(client, ids, **fields).choices[0]
    found = whole.logprobs
    assert found.text_offset[:2] == [0, len(found.tokens[0])]
    for token, offset in zip(found.tokens[:5], found.text_offset, strict=False):
        assert whole.text.startswith(token, offset)
    streamed = [chunk.choices[0].logprobs for chunk in complete(client, ids, stream=True, **fields)]
    assert [each for part in streamed if part for each in part.text_offset] == found.text_offset


def test_offsets_are_the_same_beside_a_stop_string_that_text_is_held_back_for(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"logprobs": 1, "max_tokens": 24}
    free = complete(client, PROMPT, **fields).choices[0]
    held_for = [text[0] + "\0" for text in sorted({token for token in free.logprobs.tokens if token})][:4]
    held = complete(client, PROMPT, **fields, stop=held_for).choices[0]
    assert held.text == free.text and held.logprobs.text_offset == free.logprobs.text_offset
    streamed = [
        chunk.choices[0].logprobs for chunk in complete(client, PROMPT, **fields, stop=held_for, stream=True)
    ]
    assert [each for part in streamed if part for each in part.text_offset] == free.logprobs.text_offset


class ScoringDaemon:
    """Scores prompts until it is let, or cancelled."""

    def __init__(self) -> None:
        self.num_scored, self.is_over = 0, False
        self.begun, self.go_on = threading.Event(), threading.Event()

    def scoring(self, plan: object) -> ScoringDaemon:
        return self

    def cancel(self) -> None:
        self.go_on.set()

    def score(self, scoring: object, ids: object) -> list[None]:
        self.num_scored += 1
        self.begun.set()
        assert self.go_on.wait(60)
        time.sleep(0.1)
        self.is_over = True
        return [None]


def test_a_prompt_is_scored_once_for_all_its_choices() -> None:
    daemon: Any = ScoringDaemon()
    daemon.go_on.set()

    async def all_scores() -> list[Any]:
        scores = PromptScores(daemon, Plan(RunConfig(), ()))
        return await asyncio.gather(*map(scores.of, make_choices([(1, 2)], 3, 5, [""])))

    assert asyncio.run(all_scores()) == [[None]] * 3 and daemon.num_scored == 1


def test_scoring_that_nobody_waits_for_is_cancelled_and_ends_before_its_turn_does() -> None:
    daemon: Any = ScoringDaemon()

    async def leave() -> None:
        (choice,) = make_choices([(1, 2)], 1, 5, [""])
        waiting = asyncio.ensure_future(PromptScores(daemon, Plan(RunConfig(), ())).of(choice))
        await asyncio.to_thread(daemon.begun.wait, 60)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert daemon.is_over

    asyncio.run(leave())


def test_a_cancelled_scoring_ends_while_no_verifier_answers() -> None:
    config = with_values(RunConfig(), verifier="127.0.0.1:9")
    scoring = TextScoring(create_link(config, bytes(16)), bytes(16))
    threading.Timer(0.2, scoring.cancel).start()
    with pytest.raises(CancelledByUser):
        scoring.run((1,), (2, 3))


def test_more_texts_than_the_daemon_takes_are_refused_whole(verifier: VerifierServer) -> None:
    flags = ("--max-requests", "1", "--max-queue", "2")
    with running_daemon(f"127.0.0.1:{verifier.port}", *flags) as process:
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="takes 3 at a time"):
                complete(client, PROMPT, n=4)
            assert len(complete(client, PROMPT, n=3).choices) == 3
            stream = complete(client, PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True})
            with pytest.raises(openai.RateLimitError):
                complete(client, PROMPT, n=3)
            stream.close()
        assert wait_until(lambda: process.num_requests() == 0)


def test_a_client_that_leaves_ends_all_its_choices(daemon: DaemonProcess, client: openai.OpenAI) -> None:
    body = {"ignore_eos": True}
    stream = complete(client, PROMPT, n=3, max_tokens=2000, stream=True, extra_body=body)
    next(iter(stream))
    sessions = httpx.get(f"{daemon.url}/v1/sessions").json()["data"]
    assert len({each["id"] for each in sessions}) == 3
    stream.close()
    assert wait_until(lambda: daemon.num_requests() == 0)


def test_the_first_choice_keeps_the_seed_and_leaders_share_a_block() -> None:
    long, other = tuple(range(40)), (*range(30), 7)
    choices = make_choices([long, (1, 2), other], 2, 5, ["", "", ""])
    assert [choice.seed for choice in choices] == [5, choice_seed(5, 1)] * 3
    assert [choice.leader for choice in choices] == [None, 0, None, None, 0, 0]
    assert [choice.is_first_of_prompt for choice in choices] == [True, False] * 3
    assert choice_seed(5, 1) != choice_seed(5, 2) != choice_seed(6, 2)
