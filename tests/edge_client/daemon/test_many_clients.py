"""Ten clients at once, one that leaves and one that stops reading: the others do not notice it."""

from __future__ import annotations

import threading

import openai
import pytest
from support.daemon.daemons import DaemonProcess, post_and_read_nothing, running_daemon, wait_until

from outrider.cloud_verifier.server.server import VerifierServer

PROMPT = "class Reader:\n"
EXTRAS = {"tokens": True, "ignore_eos": True}
LONG = {"prompt": PROMPT, "max_tokens": 3000, "stream": True, "outrider": EXTRAS}
ENDLESS = {"max_tokens": 3000, "extra_body": {"outrider": {"ignore_eos": True}}}


def write(client: openai.OpenAI, seed: int) -> str:
    answer = client.completions.create(model="outrider", prompt=PROMPT, seed=seed, max_tokens=24, stream=True)
    return "".join(chunk.choices[0].text for chunk in answer)


def is_at_rest(daemon: DaemonProcess, verifier: VerifierServer) -> bool:
    is_idle = daemon.num_requests() == 0
    return is_idle and verifier.engine.num_sessions == 0 and verifier.service.num_streams == 0


def test_ten_clients_one_that_leaves_and_one_that_stops_reading(
    daemon: DaemonProcess, client: openai.OpenAI, verifier: VerifierServer
) -> None:
    alone = {seed: write(client, seed) for seed in (1, 2)}
    assert wait_until(lambda: is_at_rest(daemon, verifier))
    num_files, num_threads = daemon.num_files(), daemon.num_threads()
    deaf = post_and_read_nothing(daemon, "/v1/completions", LONG)
    leaving = client.completions.create(model="outrider", prompt=PROMPT, stream=True, **ENDLESS)
    texts: list[tuple[int, str]] = []

    seeds = [1 + number % 2 for number in range(8)]
    threads = [
        threading.Thread(target=lambda seed=seed: texts.append((seed, write(client, seed)))) for seed in seeds
    ]
    for thread in threads:
        thread.start()
    next(iter(leaving))
    # The two that came first have no end: a text that is there already was written beside them.
    assert wait_until(lambda: bool(texts) or daemon.num_requests() >= 3), "they run at the same time"
    leaving.close()
    for thread in threads:
        thread.join()
    assert sorted(texts) == sorted([(seed, alone[seed]) for seed in (1, 2)] * 4)
    assert wait_until(lambda: is_at_rest(daemon, verifier)), "the deaf client is cut off, nothing stays open"
    with deaf, pytest.raises(ConnectionResetError):
        while deaf.recv(65536):
            pass
    assert wait_until(lambda: daemon.num_threads() <= num_threads), "no thread stays"
    assert wait_until(lambda: daemon.num_files() <= num_files + 10), "connections of the pool aside, no file"
    verifier.engine.check_integrity()


def test_what_exceeds_the_queue_is_a_rate_limit_with_a_hint(verifier: VerifierServer) -> None:
    address = f"127.0.0.1:{verifier.port}"
    with running_daemon(address, "--max-requests", "1", "--max-queue", "1", "--stop-grace-s", "60") as daemon:
        client = openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=60)
        first = client.completions.create(model="outrider", prompt=PROMPT, stream=True, **ENDLESS)
        next(iter(first))
        second: list[str] = []
        waiting = threading.Thread(target=lambda: second.append(write(client, 1)))
        waiting.start()
        assert wait_until(lambda: daemon.get("/v1/sessions")["waiting"] == 1)
        states = [session["state"] for session in daemon.get("/v1/sessions")["data"]]
        assert states == ["running", "waiting"]
        with pytest.raises(openai.RateLimitError) as caught:
            write(client, 2)
        assert caught.value.code == "queue_full" and int(caught.value.response.headers["retry-after"]) >= 1
        first.close()
        waiting.join(60)
        assert second and second[0], "its turn came when the first one left"
        _stop_in_mid_stream(daemon, client)
    assert wait_until(lambda: verifier.engine.num_sessions == 0)


def _stop_in_mid_stream(daemon: DaemonProcess, client: openai.OpenAI) -> None:
    """SIGTERM: what runs goes on to its end, nobody new is taken, and the exit is an orderly one."""
    stream = client.completions.create(model="outrider", prompt=PROMPT, max_tokens=100, stream=True, seed=1)
    pieces = [next(iter(stream)).choices[0]]
    daemon.server.process.terminate()
    assert wait_until(lambda: _is_refused(daemon))
    pieces += [chunk.choices[0] for chunk in stream]
    assert pieces[-1].finish_reason in ("length", "stop")
    assert daemon.server.process.wait(60) == 0, "before the grace is over"
    client.close()


def _is_refused(daemon: DaemonProcess) -> bool:
    try:
        daemon.get("/health")
    except OSError:
        return True
    return False
