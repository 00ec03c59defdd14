"""Choose the shape of drafted trees by measured accuracies, for `edge-client run --tree N --tree-shape FILE`.

    python -m outrider.training.calibrate_tree --text FILES --out tree.json

The target continues passages of the text with the noise that an edge shares. Its token is the draft's choice i at depth
d of a path, all before it being right, with the accuracy a[d][i]; a node's value is the product along its path, and the
tree takes the most valuable node that continues it, again and again (Medusa, Cai et al. 2024, arXiv 2401.10774,
"Searching for the Optimized Tree Construction").
"""

import argparse
import heapq
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from outrider.cloud_verifier.backends.loading import load_target
from outrider.common.errors import UsageError
from outrider.edge_client.calibration.passages import cut_passages, read_texts
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.trees import DEFAULT_DEPTH, DEFAULT_NODES, MAX_CONTINUATIONS, Ranks
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.command import run_command
from outrider.models import EMBEDDED
from outrider.training.judge.target_text import WrittenText, written_texts

Accuracies = list[list[float]]  # [depths, MAX_CONTINUATIONS]


def choices_taken(model: OnnxDraftModel, text: WrittenText) -> list[int]:
    """Returns which choice of the draft, by score plus noise after the tokens before it, each new token is;
    `MAX_CONTINUATIONS`: none of them."""
    sequence = model.sequence(text.sampling, num_prompt_tokens=len(text.prompt))
    sequence.commit(text.prompt)
    taken = []
    for token_id in text.new:
        told = sequence.tell(sequence.feed_root(), ()).token_ids
        taken.append(told.index(token_id) if token_id in told else MAX_CONTINUATIONS)
        sequence.commit([token_id])
    sequence.close()
    return taken


def accuracies(taken: Sequence[Sequence[int]], max_depth: int) -> Accuracies:
    """Returns how often each choice is right at each depth, of the paths from any token on that are right so far."""
    starts = ((choices, start) for choices in taken for start in range(len(choices)))
    return path_accuracies((choices[start : start + max_depth] for choices, start in starts), max_depth)


def path_accuracies(paths: Iterable[Sequence[int]], max_depth: int) -> Accuracies:
    """Returns the same of paths that have choices of their own at each start."""
    counts = [[0] * (MAX_CONTINUATIONS + 1) for _ in range(max_depth)]
    for path in paths:
        for depth, choice in enumerate(path):
            counts[depth][choice] += 1
            if choice == MAX_CONTINUATIONS:
                break
    return [[count / max(1, sum(row)) for count in row[:MAX_CONTINUATIONS]] for row in counts]


def best_shape(accuracies: Accuracies, num_nodes: int) -> tuple[tuple[Ranks, ...], float]:
    """Returns the nodes in order of their value, and the tokens that a round commits with them: their values' sum
    and one. They are fewer than `num_nodes` where no other node has a value."""
    shape: list[Ranks] = []
    tokens = 1.0
    waiting: list[tuple[float, Ranks]] = []

    def open_after(value: float, ranks: Ranks) -> None:
        if len(ranks) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(ranks)]):
                if accuracy:
                    heapq.heappush(waiting, (-value * accuracy, (*ranks, rank)))

    open_after(1.0, ())
    while waiting and len(shape) < num_nodes:
        negative, ranks = heapq.heappop(waiting)
        shape.append(ranks)
        tokens -= negative
        open_after(-negative, ranks)
    return tuple(shape), tokens


def calibrate(args: argparse.Namespace) -> tuple[tuple[Ranks, ...], dict[str, object]]:
    """Returns the shape, and what people may want to know about it. Raises `UsageError` and `ModelError` for text and
    directories that cannot be used."""
    tokenizer = EdgeTokenizer(args.draft / "tokenizer.json")
    documents = read_texts(args.text)
    passages = cut_passages(
        documents.documents,
        tokenizer.encode,
        num_passages=args.num_passages,
        num_prompt_tokens=args.num_prompt_tokens,
        num_following_tokens=args.num_new_tokens,
        needs_following=False,
    )
    prompts = [passage.prompt_ids for passage in passages]
    backend = load_target(args.target)
    with OnnxDraftModel.open(args.draft) as model:
        if model.tokenizer_fingerprint != tokenizer.fingerprint or model.num_tokens != backend.num_tokens:
            raise UsageError(f"--draft {args.draft} and --target {args.target} have other tokenizers")
        texts = written_texts(backend, prompts, args.temperature, args.num_new_tokens)
        shown = tqdm(texts, desc="passages", total=len(prompts), disable=None)
        taken = [choices_taken(model, text) for text in shown]
        found = accuracies(taken, args.max_depth)
        fingerprint = model.fingerprint
    shape, tokens = best_shape(found, args.num_nodes)
    if not shape:
        raise UsageError(f"--draft {args.draft}: the target's token was never among its choices")
    about = {
        "tokens_a_round": round(tokens, 3),
        "temperature": args.temperature,
        "num_tokens": sum(map(len, taken)),
        "draft_fingerprint": fingerprint,
        "texts_sha256": documents.sha256,
        "accuracies": [[round(each, 4) for each in row] for row in found],
    }
    return shape, about


def parse_args() -> argparse.Namespace:
    """Returns the options; exits naming what is wrong with them."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.calibrate_tree",
        description="Choose the shape of drafted trees by measured accuracies.",
        epilog="Then: edge-client run --tree N --tree-shape FILE",
    )
    parser.add_argument("--target", type=Path, default=EMBEDDED / "target", help="Hugging Face directory")
    parser.add_argument("--draft", type=Path, default=EMBEDDED / "draft", help="an exported draft")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="files of text, or .jsonl")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--num-nodes", type=positive, default=DEFAULT_NODES, metavar="N")
    parser.add_argument("--max-depth", type=positive, default=DEFAULT_DEPTH, metavar="N", help="of a path")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T")
    parser.add_argument("--num-passages", type=positive, default=40, metavar="N")
    parser.add_argument("--num-prompt-tokens", type=positive, default=32, metavar="N")
    parser.add_argument(
        "--num-new-tokens", type=positive, default=160, metavar="N", help="after each passage"
    )
    return parser.parse_args()


def positive(text: str) -> int:
    """Returns a count. Raises ValueError for one below 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def main() -> int:
    """Runs the command."""
    args = parse_args()
    shape, about = calibrate(args)
    args.out.write_text(json.dumps({"choices": shape, "about": about}) + "\n", encoding="utf-8")
    depth, tokens = max(map(len, shape)), about["tokens_a_round"]
    print(f"{len(shape)} nodes on {depth} levels, {tokens} tokens a round expected: {args.out}")
    return 0


if __name__ == "__main__":
    run_command("calibrate_tree", main)
