"""What a daemon counts of the texts it writes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import openai
import pytest
from support.daemon.daemons import DaemonProcess, running_daemon, wait_until
from support.edge.tiny_draft import make_backend, make_tiny_draft
from support.processes.server import serving

PROMPT = "def read_lines(path):\n" * 6


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon that writes one text at a time, slowly."""
    draft = make_tiny_draft(tmp_path_factory.mktemp("draft"))
    flags = ("--draft", str(draft), "--max-requests", "1", "--min-draft-ms", "20", "--on-timeout", "wait")
    with (
        serving(make_backend(draft)) as verifier,
        running_daemon(f"127.0.0.1:{verifier.port}", *flags) as made,
    ):
        yield made


@pytest.fixture
def its_client(narrow: DaemonProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def sample(daemon: DaemonProcess, name: str) -> float:
    """A sample's value, 0 where it does not exist yet."""
    text = daemon.get("/metrics").decode()
    found = re.search(rf"^outrider_edge_{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def write(client: openai.OpenAI, mode: str, num_tokens: int = 4) -> float:
    """Writes a text, and returns the seconds to its first token."""
    start_s, first_s = time.monotonic(), 0.0
    for _ in client.completions.create(
        model="outrider",
        prompt=PROMPT,
        max_tokens=num_tokens,
        seed=1,
        stream=True,
        extra_body={"outrider": {"mode": mode, "ignore_eos": True}},
    ):
        first_s = first_s or time.monotonic() - start_s
    return first_s


def test_the_time_to_the_first_token_includes_the_wait_in_the_queue(
    narrow: DaemonProcess, its_client: openai.OpenAI
) -> None:
    count, total_s = "ttft_seconds_count", "ttft_seconds_sum"
    num_before, before_s = sample(narrow, count), sample(narrow, total_s)
    long = threading.Thread(target=write, args=(its_client, "edge-only", 120))  # 120 × 20 ms at least
    long.start()
    assert wait_until(lambda: narrow.num_requests() == 1)
    felt_s = write(its_client, "edge-only")
    long.join()
    assert wait_until(lambda: sample(narrow, count) == num_before + 2)
    assert felt_s > 0.3, "it waited for the other text"
    assert sample(narrow, total_s) - before_s > 0.8 * felt_s


def test_what_no_draft_reads_is_no_miss_of_its_cache(
    narrow: DaemonProcess, its_client: openai.OpenAI
) -> None:
    hit, miss = (f'draft_prefix_tokens_total{{result="{each}"}}' for each in ("hit", "miss"))

    def counted(mode: str) -> tuple[float, float]:
        done = sample(narrow, "ttft_seconds_count") + 1
        before = sample(narrow, hit), sample(narrow, miss)
        write(its_client, mode)
        assert wait_until(lambda: sample(narrow, "ttft_seconds_count") == done)
        return sample(narrow, hit) - before[0], sample(narrow, miss) - before[1]

    assert counted("cloud-only") == (0, 0)
    num_hit, num_tokens = counted("speculative")
    assert num_hit == 0 < num_tokens
    num_hit, num_miss = counted("speculative")
    assert num_hit > num_miss and num_hit + num_miss == num_tokens
    assert counted("cloud-only") == (0, 0)
