"""The commands as a user runs them: real processes, a verifier whose engine the test can look into."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.calls import eventually
from support.models import make_tiny_target
from support.notes import Note
from support.processes.forked import start_verifier
from support.processes.pairs import Pair
from support.processes.server import serving

from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.edge_client.drafting.export.exporter import export_draft

STATS = (
    "num_rounds num_draft_tokens num_accepted_tokens acceptance_rate tokens_per_round ttft_ms tpot_ms "
    "bytes_up bytes_down num_fallback_tokens draft_ms rtt_ms forward_ms"
).split()
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is blocked by the test")
sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture(scope="module")
def server(tiny_pair: Pair) -> Iterator[VerifierServer]:
    with serving(load_target(tiny_pair.target)) as server:
        yield server


def edge(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider.edge_client", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def run_arguments(server: VerifierServer, pair: Pair) -> list[str]:
    return ["run", "--verifier", f"127.0.0.1:{server.port}", "--draft", str(pair.own_draft)]


def test_json_holds_what_the_contract_names_and_both_modes_agree(
    server: VerifierServer, tiny_pair: Pair
) -> None:
    outputs = {}
    for mode in ("speculative", "cloud-only", "edge-only"):
        done = edge(
            *run_arguments(server, tiny_pair),
            *("--mode", mode, "--json", "--seed", "5", "--max-new-tokens", "24", "--ignore-eos", "def f"),
        )
        assert done.returncode == 0, done.stderr
        output = outputs[mode] = json.loads(done.stdout)
        assert len(output["token_ids"]) == len(output["token_origins"]) == 24
        assert output["finish_reason"] == "length" and output["seed"] == 5
        assert set(STATS) <= set(output["stats"])
        assert output["num_unverified_tokens"] == (24 if mode == "edge-only" else 0)
        assert output["draft_fingerprint"] or mode == "cloud-only"
        assert output["reproducible"] is (mode != "edge-only")
    assert outputs["speculative"]["token_ids"] == outputs["cloud-only"]["token_ids"]
    assert outputs["speculative"]["text"] == outputs["cloud-only"]["text"]
    assert outputs["speculative"]["target_fingerprint"] == server.engine.backend.fingerprint
    assert server.engine.num_sessions == 0, "the edge closes its sessions"


def test_sparse_trees_write_the_greedy_text(server: VerifierServer, tiny_pair: Pair) -> None:
    arguments = [*run_arguments(server, tiny_pair), "--json", "--temperature", "0", "--max-new-tokens", "40"]
    arguments += ["--ignore-eos", "x = "]
    whole = json.loads(edge(*arguments, "--mode", "cloud-only").stdout)["token_ids"]
    for size, *flags in [("16",), ("auto",), ("16", "--pipeline", "on")]:
        done = edge(*arguments, "--method", "sparse", "--tree", size, *flags)
        assert done.returncode == 0, done.stderr
        output = json.loads(done.stdout)
        assert output["token_ids"] == whole
        assert output["stats"]["num_tree_rounds"] > 0 or size == "auto"
    done = edge(*arguments, "--method", "block", "--tree", "16")
    assert done.returncode == 2 and "--tree 16 goes with --method coupled, sparse or typical" in done.stderr


def test_a_stop_string_and_a_stop_id_hold_in_the_middle_of_a_draft(
    server: VerifierServer, tiny_pair: Pair
) -> None:
    arguments = [*run_arguments(server, tiny_pair), "--json", "--temperature", "0", "--max-new-tokens", "40"]
    whole = json.loads(edge(*arguments, "--ignore-eos", "x = ").stdout)
    text, ids = whole["text"], whole["token_ids"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    for mode in ("speculative", "cloud-only"):
        done = edge(*arguments, "--ignore-eos", "--mode", mode, "--stop", stop, "x = ")
        cut = json.loads(done.stdout)
        assert cut["finish_reason"] == "stop" and cut["text"] == text[: text.index(stop)]
        done = edge(*arguments, "--ignore-eos", "--mode", mode, "--stop-token-id", str(ids[9]), "x = ")
        assert json.loads(done.stdout)["token_ids"] == ids[: ids.index(ids[9]) + 1]


def test_without_torch_an_edge_run_passes_and_talks_to_nobody_but_the_verifier(
    server: VerifierServer, tiny_pair: Pair, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    probe = edge("--version", env=environment)
    assert probe.returncode == 0, probe.stderr
    blocked = subprocess.run(
        [sys.executable, "-c", "import torch"], env=environment, capture_output=True, text=True, check=False
    )
    assert "blocked by the test" in blocked.stderr, "the block does not work"
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider.edge_client", *run_arguments(server, tiny_pair)]
        + ["--json", "--max-new-tokens", "64", "--min-draft-ms", "5", "--ignore-eos", "def f"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    peers: set[str] = set()
    watcher = threading.Thread(target=lambda: peers.update(watch_peers(process)))
    watcher.start()
    stdout, stderr = process.communicate(timeout=60)
    watcher.join()
    assert process.returncode == 0, stderr
    assert len(json.loads(stdout)["token_ids"]) == 64
    assert peers == {f"127.0.0.1:{server.port}"}


def watch_peers(process: subprocess.Popen[str]) -> set[str]:
    """Remote addresses of every internet socket the process holds, looked at each millisecond."""
    peers: set[str] = set()
    while process.poll() is None:
        try:
            links = [
                os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")
            ]
        except OSError:
            continue
        inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in inodes and not re.fullmatch("0+:0000", fields[2]):
                    peers.add(decode_address(fields[2]))
        time.sleep(0.001)
    return peers


def decode_address(text: str) -> str:
    """`0100007F:1F90` → `127.0.0.1:8080`; IPv4 in IPv6 likewise."""
    address, _, port = text.partition(":")
    number = bytes.fromhex(address[-8:])[::-1]
    return ".".join(map(str, number)) + f":{int(port, 16)}"


@pytest.mark.parametrize(
    ("mode", "number"),
    [("speculative", signal.SIGINT), ("cloud-only", signal.SIGINT), ("auto", signal.SIGTERM)],
)
def test_a_signal_cancels_on_both_sides_and_keeps_the_text(
    tiny_pair: Pair, mode: str, number: signal.Signals
) -> None:
    # Slow enough that the text is not over before the signal comes.
    with serving(load_target(tiny_pair.target), ServeConfig(min_forward_ms=20.0)) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "outrider.edge_client", *run_arguments(server, tiny_pair), "--mode", mode]
            + ["--json", "--max-new-tokens", "400", "--ignore-eos", "def f"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert eventually(lambda: server.engine.num_steps >= 5)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 128 + number, stderr
        output = json.loads(stdout)
        assert output["finish_reason"] == "cancelled" and 0 < len(output["token_ids"]) < 400
        assert "Traceback" not in stderr
        assert eventually(lambda: server.engine.num_sessions == 0)


def spent_by_children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_answers_quickly() -> None:
    """In CPU time: how long it waits for a core is the machine's doing."""
    times = []
    for _ in range(3):
        before_s = spent_by_children_s()
        assert edge("--help").returncode == 0
        times.append(spent_by_children_s() - before_s)
    assert min(times) < 0.4, times


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_while_kernels_compile_ends_the_verifier_at_once(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider.cloud_verifier", "serve", "--listen", "127.0.0.1:0"]
        + ["--admin-listen", "127.0.0.1:0"],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "compiling the kernels" in line:
                break
        begin_s = time.monotonic()
        os.killpg(
            process.pid, number
        )  # as a terminal and systemd do, which reach the processes that compile too
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, told
    assert "Traceback" not in told and "terminate called" not in told
    assert time.monotonic() - begin_s < 10, "compiling takes three times as long"


def installed_size(extra: str) -> dict[str, int]:
    """Bytes a distribution of the extra's closure put on disk, compiled files left out."""
    sizes: dict[str, int] = {}
    waiting = [Requirement(f"outrider[{extra}]")]
    while waiting:
        requirement = waiting.pop()
        name = requirement.name.lower().replace("_", "-")
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        extras = requirement.extras or {""}
        if name in sizes and not requirement.extras:
            continue
        files = [f for f in found.files or [] if not str(f).endswith(".pyc")]
        sizes[name] = (
            0
            if name == "outrider"
            else sum(p.stat().st_size for f in files if (p := Path(str(f.locate()))).is_file())
        )
        for text in found.requires or []:
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(needed)
    return sizes


def test_the_edge_extra_installs_in_under_200_mb(note: Note) -> None:
    sizes = installed_size("edge")
    assert {"onnxruntime", "numpy", "grpcio", "tokenizers"} <= set(sizes), sizes
    assert not {"torch", "transformers"} & set(sizes)
    total = sum(sizes.values()) / 1e6
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:6]
    note(f"edge extra: {total:.0f} MB: {', '.join(f'{k} {v / 1e6:.1f}' for k, v in largest)} ...")
    assert total < 200


# ----------------------------------------------------------------------------------------- bad input


def check_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode not in (0, -signal.SIGSEGV), done.stdout
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last, last


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "hot"], ["temperature"]),
        pytest.param(["--temperature", "-1"], ["temperature"], marks=pytest.mark.slow),
        pytest.param(["--temperature", "nan"], ["temperature"], marks=pytest.mark.slow),
        pytest.param(["--top-p", "0"], ["top_p"], marks=pytest.mark.slow),
        pytest.param(["--max-new-tokens", "0"], ["max_new_tokens"], marks=pytest.mark.slow),
        pytest.param(["--num-speculative-tokens", "-1"], ["num_speculative_tokens"], marks=pytest.mark.slow),
        (["--mode", "magic"], ["mode", "speculative"]),
        pytest.param(["--method", "sparze"], ["sparze", "sparse"], marks=pytest.mark.slow),
        pytest.param(["--on-timeout", "never"], ["on_timeout"], marks=pytest.mark.slow),
        pytest.param(["--transport", "pigeon"], ["transport"], marks=pytest.mark.slow),
        pytest.param(["--logit-bias", "1=2"], ["logit-bias"], marks=pytest.mark.slow),
        (["--logit-bias", "99999:1"], ["logit_bias"]),
        pytest.param(["--stop-token-id", "99999"], ["stop_token_id"], marks=pytest.mark.slow),
        (["--verifier", "nowhere"], ["HOST:PORT"]),
        (["--verifier", "127.0.0.1:1"], ["127.0.0.1:1"]),
        (["--draft", "/does/not/exist"], ["/does/not/exist"]),
        pytest.param(["--config", "/does/not/exist.yaml"], ["/does/not/exist.yaml"], marks=pytest.mark.slow),
        (["--prompt-file", "/does/not/exist.txt"], ["/does/not/exist.txt"]),
        (["--no-such-flag"], ["no-such-flag"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_wrong_flags_and_missing_files_give_one_clear_line(
    server: VerifierServer, tiny_pair: Pair, arguments: list[str], words: list[str]
) -> None:
    base = run_arguments(server, tiny_pair)
    prompt = [] if "--prompt-file" in arguments else ["def f"]
    check_one_line(edge(*base, *arguments, *prompt), *words)


def test_an_unknown_key_of_a_configuration_file_is_refused_by_name(
    server: VerifierServer, tiny_pair: Pair, tmp_path: Path
) -> None:
    path = tmp_path / "edge.yaml"
    path.write_text("temprature: 0.5\n")
    check_one_line(
        edge(*run_arguments(server, tiny_pair), "--config", str(path), "x"), "temprature", "temperature"
    )


def test_an_empty_prompt_and_one_past_the_context_are_refused_and_others_are_served(
    server: VerifierServer, tiny_pair: Pair
) -> None:
    check_one_line(edge(*run_arguments(server, tiny_pair), ""), "empty")
    check_one_line(edge(*run_arguments(server, tiny_pair), "-", input="word " * 5000), "context")
    assert edge(*run_arguments(server, tiny_pair), "--max-new-tokens", "4", "def f").returncode == 0


def test_a_draft_of_another_vocabulary_is_refused_with_what_to_do(
    server: VerifierServer, tmp_path: Path
) -> None:
    other = make_tiny_target(tmp_path / "hf", vocab=300, hidden=64, num_layers=1)
    export_draft(other, tmp_path / "draft")
    done = edge("run", "--verifier", f"127.0.0.1:{server.port}", "--draft", str(tmp_path / "draft"), "def f")
    check_one_line(done, "the draft's tokenizer is not the target's", "--draft DIR")
    assert not re.search(r"[0-9a-f]{12}", done.stderr)


def test_a_verifier_with_a_wrong_target_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outrider.cloud_verifier", "serve"]
    for arguments, words in (
        (["--target", str(tmp_path)], ["config.json"]),
        (["--listen", "0.0.0.0:0"], ["--insecure"]),
        (["--dtype", "int3"], ["dtype"]),
        (["--max-sessions", "none"], ["max_sessions"]),
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)
        check_one_line(done, *words)


def test_the_verifier_drains_and_stops_on_sigterm(tiny_pair: Pair) -> None:
    verifier = start_verifier("--drain-grace-s", "0.5", target=tiny_pair.target)
    assert verifier.stop() == 0
