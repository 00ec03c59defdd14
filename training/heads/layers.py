"""Search which of a target's layers draft for it, the target staying as it is: Draft & Verify (Zhang et al. 2023,
arXiv 2309.08168).

    python -m outrider.training.heads layers --target DIR --text FILES|--data DIR --out DIR

The target continues passages of text; each set of layers drafts chains along what it wrote, as a verifier would have
it do, and its rounds are timed in turns with the target's own steps. Few layers are tried in every combination, many by
changing one or two of the best set so far. The best set is judged on passages that it was not chosen by. Writes
config.json, which `cloud-verifier serve --heads` reads, and layers.json with all that was tried.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.passes.partial import SkipsLayers
from outrider.cloud_verifier.heads.early_exit import DEFAULT_CHAIN, EarlyExit
from outrider.cloud_verifier.heads.source import WantedDraft
from outrider.common.errors import ModelError, UsageError
from outrider.common.types import Draft, SamplingParams
from outrider.training.calibrate_tree import positive
from outrider.training.heads.directory import write_early_exit
from outrider.training.heads.judge import add_text_options, prompts_of
from outrider.training.judge.target_text import WrittenText, written_texts

Layers = tuple[int, ...]
TOGETHER = 16  # texts that are drafted in the same runs
TIMED_ROUNDS = 15  # of a set of layers, each beside a step of one token
RANDOM_SHARE = 0.15  # of the sets tried that are not near the best one
TRIALS_FILE = "layers.json"


@dataclass(frozen=True)
class Trial:
    """Holds what was measured of one set of layers."""

    layers: Layers
    tokens_a_round: float
    steps_a_round: float
    """How long a round takes, drafting included, in steps of the target that give one token."""

    @property
    def gain(self) -> float:
        """Returns the tokens a second beside the target's alone."""
        return self.tokens_a_round / self.steps_a_round


def replayed_tokens_a_round(source: EarlyExit, texts: Sequence[WrittenText], chain: int) -> float:
    """Returns the tokens that a round commits, correction or bonus included, where chains are drafted along texts of
    the target."""
    num_tokens = num_rounds = 0
    for start in range(0, len(texts), TOGETHER):
        replays = [_Replay(source, text) for text in texts[start : start + TOGETHER]]
        while live := [each for each in replays if each.num_left]:
            source.backend.forward([each.missing() for each in live])
            wanted = [WantedDraft(min(chain, each.num_left - 1)) for each in live]
            drafts = source.propose_together([each.sequence for each in live], wanted)
            for each, draft in zip(live, drafts, strict=True):
                num_tokens += each.take(draft)
            num_rounds += len(live)
        for each in replays:
            each.close()
    return num_tokens / max(1, num_rounds)


class _Replay:
    """Drafts along one text. KV is of all tokens but the last, as between a verifier's rounds."""

    def __init__(self, source: EarlyExit, text: WrittenText) -> None:
        self.sequence = source.sequence(text.sampling, num_prompt_tokens=len(text.prompt))
        self._backend, self._kv = source.backend, source.backend.new_sequence()
        self._ids, self._position = (*text.prompt, *text.new), len(text.prompt) + 1

    @property
    def num_left(self) -> int:
        return len(self._ids) - self._position

    def missing(self) -> ForwardItem:
        self.sequence.commit(self._ids[self.sequence.position : self._position])
        self.sequence.kv = self._kv
        return ForwardItem(self._kv, self._ids[self._kv.length : self._position - 1], 0)

    def take(self, draft: Draft | Exception) -> int:
        """Returns how many tokens the round commits."""
        if isinstance(draft, Exception):
            raise draft
        self._backend.release_reserved(self._kv)
        wanted = self._ids[self._position :]
        pairs = enumerate(zip(draft.token_ids, wanted, strict=False))
        num_accepted = next((i for i, pair in pairs if pair[0] != pair[1]), len(draft.token_ids))
        self._position += num_accepted + 1
        return num_accepted + 1

    def close(self) -> None:
        self.sequence.close()
        self._backend.close(self._kv)


def timed_steps_a_round(source: EarlyExit, text: Sequence[int], chain: int) -> float:
    """Returns how long drafting and verifying a chain takes, in steps of one token after `text`: medians of both, in
    turns."""
    backend, kv = source.backend, source.backend.new_sequence()
    sequence = source.sequence(SamplingParams(temperature=0.0))
    sequence.commit(text)
    backend.forward([ForwardItem(kv, text[:-1], 0)])
    sequence.kv = kv

    def step() -> None:
        backend.forward([ForwardItem(kv, text[-1:], 1)])

    def round_() -> None:
        token_ids = sequence.propose(chain).token_ids
        backend.forward([ForwardItem(kv, [text[-1], *token_ids], len(token_ids) + 1, states=sequence.states)])

    took: dict[Callable[[], None], list[float]] = {step: [], round_: []}
    for _ in range(TIMED_ROUNDS):
        for work, seconds in took.items():
            begin_s = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begin_s)
            backend.truncate(kv, len(text) - 1)
    backend.close(kv)
    return statistics.median(took[round_]) / statistics.median(took[step])


def search(
    num_layers: int, measure: Callable[[Layers], Trial], num_trials: int, seed: int = 0
) -> list[Trial]:
    """Returns what was tried, the best first: every set of layers where `num_trials` are enough for that, else those
    that `_near_best` proposes."""
    trials: dict[Layers, Trial] = {}
    if 2**num_layers - 2 <= num_trials:
        sizes = range(1, num_layers)
        every = (layers for size in sizes for layers in combinations(range(num_layers), size))
        trials = {layers: measure(layers) for layers in every}
    else:
        for layers in _near_best(num_layers, trials, num_trials, np.random.default_rng(seed)):
            trials[layers] = measure(layers)
            if len(trials) == num_trials:
                break
    return sorted(trials.values(), key=lambda trial: -trial.gain)


def _near_best(
    num_layers: int, trials: dict[Layers, Trial], num_trials: int, rng: np.random.Generator
) -> Iterator[Layers]:
    """Yields sets that were not tried: first exits, spread over the depth, then sets like the best one but for a layer
    or two, and some at random. `trials` grows meanwhile."""
    num_exits = max(1, min(num_layers - 1, num_trials // 4))
    for exit_layer in np.unique(np.linspace(1, num_layers - 1, num_exits).round().astype(int)):
        yield tuple(range(exit_layer))
    while True:
        best = max(trials.values(), key=lambda trial: trial.gain)
        is_kept = np.isin(np.arange(num_layers), best.layers)
        if rng.random() < RANDOM_SHARE:
            is_kept = rng.random(num_layers) < rng.uniform(0.2, 0.8)
        else:
            changed = rng.choice(num_layers, size=int(rng.integers(1, 3)), replace=False)
            is_kept[changed] = ~is_kept[changed]
        layers = tuple(np.flatnonzero(is_kept).tolist())
        if layers not in trials and 0 < len(layers) < num_layers:
            yield layers


def find_layers(args: argparse.Namespace) -> tuple[list[Trial], Trial]:
    """Writes the directory; returns what was tried, the best first, and the best one on the passages kept apart.

    Raises `UsageError`, `ModelError`, ValueError and OSError for what cannot be used.
    """
    backend = load_target(args.target, num_threads=args.threads)
    if not isinstance(backend.decoder, SkipsLayers):
        raise ModelError(
            f"--target {args.target}: early exit wants an architecture that our own decoder runs"
        )
    chosen_by, kept_apart = (_texts(backend, args, prompts) for prompts in prompts_of(args))
    num_layers, begin_s = backend.facts.num_layers, time.monotonic()
    num_sets = min(args.trials, 2**num_layers - 2)
    tried: list[Trial] = []

    def measure(layers: Layers, texts: Sequence[WrittenText] = chosen_by) -> Trial:
        source = EarlyExit(backend, layers, "")
        ids = (*texts[0].prompt, *texts[0].new)
        steps = timed_steps_a_round(source, ids, args.chain)
        return Trial(layers, replayed_tokens_a_round(source, texts, args.chain), steps)

    def measure_and_tell(layers: Layers) -> Trial:
        tried.append(measure(layers))
        best = max(tried, key=lambda trial: trial.gain)
        left_s = (time.monotonic() - begin_s) / len(tried) * (num_sets - len(tried))
        line = f"layers: {len(tried)} of {num_sets}, {_line(tried[-1])}; best {_show(best.layers)} {best.gain:.2f}"
        print(f"{line}, {left_s / 60:.1f} min left", file=sys.stderr, flush=True)
        return tried[-1]

    trials = search(num_layers, measure_and_tell, args.trials, args.seed)
    judged = measure(trials[0].layers, kept_apart)
    write_early_exit(judged.layers, args.target, args.out)
    record = {
        "chain": args.chain,
        "temperatures": args.temperature,
        "num_tokens": sum(len(text.new) for text in chosen_by),
        "judged": asdict(judged),
        "tried": [asdict(trial) for trial in trials],
    }
    (args.out / TRIALS_FILE).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return trials, judged


def _texts(
    backend: PagedBackend, args: argparse.Namespace, prompts: Sequence[tuple[int, ...]]
) -> list[WrittenText]:
    return [
        text
        for temperature in args.temperature
        for text in written_texts(backend, prompts, temperature, args.num_new_tokens)
    ]


def parse_args(arguments: list[str]) -> argparse.Namespace:
    """Returns the options; exits naming what is wrong with them."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.heads layers",
        description="Search which of a target's layers draft for it. The target stays as it is.",
    )
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face directory with tokenizer")
    add_text_options(parser, num_passages=32)
    parser.add_argument("--out", type=Path, required=True, help="where config.json and layers.json go")
    parser.add_argument("--trials", type=positive, default=80, metavar="N", help="sets of layers to try")
    parser.add_argument(
        "--chain", type=positive, default=DEFAULT_CHAIN, metavar="N", help="tokens of a draft"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Runs the command."""
    args = parse_args(arguments)
    try:
        trials, judged = find_layers(args)
    except (UsageError, ModelError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print("layers, tokens a round, steps of one token that a round takes, tokens/s : the target's alone")
    for trial in trials[:10]:
        print(f"  {_line(trial)}")
    print(f"{args.out}, on passages kept apart: {_line(judged)}")


def _show(layers: Layers) -> str:
    return " ".join(map(str, layers))


def _line(trial: Trial) -> str:
    return f"{_show(trial.layers)}: {trial.tokens_a_round:.2f} / {trial.steps_a_round:.2f} = {trial.gain:.2f}"
