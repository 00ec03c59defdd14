"""Judge heads on text that their target writes, and choose the shape of their trees.

    python -m outrider.training.heads.judge --heads DIR [DIR …] --target DIR --text FILES|--data DIR

The target continues passages of held-out text, greedily and with the noise that an edge shares; a head's choices are
ranked by score plus noise. Half of the passages measure the accuracies of the choices, from which the shape is made
(`outrider.training.calibrate_tree`); on the other half, or on what follows `--judge-text`, rounds are replayed. Writes
tree.json, whose first N nodes are the shape of N, and evaluation.json into each heads' directory.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.cloud_verifier.backends.loading import load_target as load_backend
from outrider.common.errors import ModelError, UsageError
from outrider.common.models.fingerprint import target_fingerprint
from outrider.common.types import TokenIds
from outrider.edge_client.calibration.passages import cut_passages, read_texts
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.training.calibrate_tree import positive
from outrider.training.data.streams import load_held_out
from outrider.training.data.tokenizer import load_tokenizer
from outrider.training.heads.directory import read_heads
from outrider.training.heads.figures import HeadsJudge, Judgement, Texts, judge_heads
from outrider.training.judge.target_text import written_texts


def judge(args: argparse.Namespace) -> dict[Path, list[Judgement]]:
    """Writes tree.json and evaluation.json of each directory of heads, and returns the figures. Raises `UsageError`,
    `ModelError` and ValueError for what cannot be used."""
    fingerprint = target_fingerprint(args.target)
    every = {directory: read_heads(directory) for directory in args.heads}
    for directory, (_, config) in every.items():
        if config["outrider"]["target_fingerprint"] != fingerprint:
            raise UsageError(f"--heads {directory} are of another target than --target {args.target}")
    backend = load_backend(args.target, num_threads=args.threads)
    prompts = prompts_of(args)
    texts: Texts = {}
    for temperature in args.temperature:
        calibration, judged = (
            list(written_texts(backend, each, temperature, args.num_new_tokens)) for each in prompts
        )
        texts[temperature] = calibration, judged
    judge = HeadsJudge(args.target)
    return {
        directory: judge_heads(judge, heads, texts, args.num_nodes, directory)
        for directory, (heads, _) in every.items()
    }


def prompts_of(args: argparse.Namespace) -> tuple[list[TokenIds], list[TokenIds]]:
    """Returns the passages to calibrate on and those to judge on. Raises `UsageError` naming the option without
    text."""
    tokenizer = EdgeTokenizer(args.target / "tokenizer.json")
    if args.data is not None:
        decode = load_tokenizer(args.target).decode
        documents = [decode(ids[1:].tolist()) for ids in load_held_out(args.data).values()]
    else:
        documents = list(read_texts(args.text).documents)
    passages = _passages(documents, tokenizer, args)
    if args.judge_text is not None:
        return passages, _passages(read_texts(args.judge_text).documents, tokenizer, args)
    if len(passages) < 2:
        raise UsageError("--text: one passage is not enough to calibrate on and to judge; add text")
    middle = len(passages) // 2
    return passages[:middle], passages[middle:]


def _passages(documents: Sequence[str], tokenizer: EdgeTokenizer, args: argparse.Namespace) -> list[TokenIds]:
    found = cut_passages(
        documents,
        tokenizer.encode,
        num_passages=args.num_passages,
        num_prompt_tokens=args.num_prompt_tokens,
        num_following_tokens=args.num_new_tokens,
        needs_following=False,
    )
    return [passage.prompt_ids for passage in found]


def add_text_options(parser: argparse.ArgumentParser, num_passages: int) -> None:
    """Adds the flags of the passages that a target continues."""
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", type=Path, nargs="+", help="files of text, or .jsonl, not trained on")
    text.add_argument("--data", type=Path, help="encoded corpus of `make pair`: its held-out files")
    parser.add_argument("--judge-text", type=Path, nargs="+", help="default: half of the passages of --text")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8], metavar="T")
    parser.add_argument("--num-passages", type=positive, default=num_passages, metavar="N")
    parser.add_argument("--num-prompt-tokens", type=positive, default=32, metavar="N")
    parser.add_argument("--num-new-tokens", type=positive, default=96, metavar="N", help="after each passage")
    parser.add_argument("--threads", type=positive, default=1, help="of the CPU")


def parse_args(arguments: list[str]) -> argparse.Namespace:
    """Returns the options; exits naming what is wrong with them."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.heads.judge",
        description="Judge heads on text of their target, and choose the shape of their trees.",
    )
    parser.add_argument("--heads", type=Path, nargs="+", required=True, help="--out of trainings")
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face directory with tokenizer")
    add_text_options(parser, num_passages=80)
    parser.add_argument("--num-nodes", type=positive, default=16, metavar="N", help="of the tree judged")
    return parser.parse_args(arguments)


def main() -> None:
    """Runs the command."""
    args = parse_args(sys.argv[1:])
    try:
        figures = judge(args)
    except (UsageError, ModelError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    for directory, judged in figures.items():
        print(f"{directory}, trees of {args.num_nodes} nodes:")
        for each in judged:
            print(f"  temperature {each.temperature}: {_line(each)}")


def _line(each: Judgement) -> str:
    firsts = ", ".join(f"{rate:.2f}" for rate in each.first_choices)
    return (
        f"{each.tokens_a_round:.2f} tokens a round ({each.expected_tokens:.2f} expected), "
        f"{each.cartesian_tokens_a_round:.2f} of the cartesian tree; first choices right {firsts}"
    )


if __name__ == "__main__":
    main()
