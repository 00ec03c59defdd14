"""What is kept of a tree in the verifier: random rounds on one sequence, whose KV is then a fresh prefill's.

Without exact rows siblings are masked, and KV differs in last bits; with them it is the same.
"""

from __future__ import annotations

import numpy as np

from benchmarks.results_file import Found
from outrider.cloud_verifier.backends.base import ForwardItem, KVSequence
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.common.tree import ROOT, Tree
from outrider.experiments.shared.results import at_most, judged
from outrider.models import EMBEDDED

NUM_ROUNDS = 10_000
ROUNDS_A_CHECK = 100
MOST_NODES = 16
LONGEST, MOST_LEFT = 220, 200  # tokens; a longer text is cut to at most so many
KV_TOKENS = 4096


def run() -> Found:
    """Returns the measure of the embedded target, without and with exact rows."""
    found = {}
    for rows in ("off", "on"):
        # One thread: a step this small gains nothing from two.
        backend = load_target(EMBEDDED / "target", kv_tokens=KV_TOKENS, num_threads=1, exact_rows=rows)
        found[f"exact rows {rows}"] = largest_difference(backend, NUM_ROUNDS)
    what = (
        f"logits after what {NUM_ROUNDS:,} random rounds kept, less a fresh prefill's, the largest of each "
        f"{ROUNDS_A_CHECK}th round; integrity after each; with exact rows {found['exact rows on']:g}"
    )
    return [judged("tree.keep", what, 1e6 * found["exact rows off"], "1e-6", at_most(100))], found


def largest_difference(backend: PagedBackend, num_rounds: int) -> float:
    """Returns how far logits after the KV that random rounds kept are from those of a fresh prefill.

    A round feeds a random tree and keeps a random path, or none of it; at times the text is cut. Asserts the
    backend's integrity after each."""
    rng = np.random.default_rng(11)
    sequence, text, largest = backend.new_sequence(), [1], 0.0
    backend.forward([ForwardItem(sequence, text, 0)])
    for number in range(num_rounds):
        tree = random_tree(rng, int(rng.integers(1, MOST_NODES + 1)))
        tokens = [int(each) for each in rng.integers(0, backend.num_tokens, len(tree))]
        backend.forward([ForwardItem(sequence, tokens, 0, tree.parents)])
        path = tree.path(int(rng.integers(ROOT, len(tree))))
        backend.keep(sequence, len(text), path)
        text += [tokens[node] for node in path]
        if len(text) > LONGEST:
            backend.truncate(sequence, keep := int(rng.integers(1, MOST_LEFT)))
            del text[keep:]
        backend.check_integrity()
        if number % ROUNDS_A_CHECK == ROUNDS_A_CHECK - 1:
            largest = max(largest, _difference(backend, sequence, text))
    backend.close(sequence)
    return largest


def _difference(backend: PagedBackend, sequence: KVSequence, text: list[int]) -> float:
    """Returns the largest difference of a row after the kept KV from that of a fresh prefill."""
    found = backend.forward([ForwardItem(sequence, [5], 1)]).copy()
    backend.truncate(sequence, len(text))
    fresh = backend.new_sequence()
    expected = backend.forward([ForwardItem(fresh, [*text, 5], 1)])
    backend.close(fresh)
    return float(np.abs(found - expected).max())


def random_tree(rng: np.random.Generator, num_nodes: int) -> Tree:
    """Returns a tree of long paths with branches, its nodes in order of their making."""
    parents = [ROOT]
    for node in range(1, num_nodes):
        parents.append(node - 1 if rng.random() < 0.6 else int(rng.integers(ROOT, node)))
    return Tree(parents)
