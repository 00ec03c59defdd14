"""Judge heads on text that their target writes, and choose the shape of their trees.

    python -m outrider.training.heads.judge --heads DIR --target DIR --text FILES|--data DIR [--judge-text FILES]

The target continues passages of held-out text, greedily and with the noise that an edge shares; a head's choices are
ranked by score plus noise. Half of the passages measure the accuracies of the choices, from which the shape is made
(`outrider.training.calibrate_tree`); on the other half, or on what follows `--judge-text`, rounds are replayed. Writes
tree.json, whose first N nodes are the shape of N, and evaluation.json into the heads' directory.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.cloud_verifier.backends.loading import load_target as load_backend
from outrider.common.errors import ModelError, UsageError
from outrider.common.models.fingerprint import target_fingerprint
from outrider.common.noise.draws import gumbel_row
from outrider.common.types import TokenIds
from outrider.edge_client.calibration.passages import cut_passages, read_texts
from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.training.calibrate_tree import Accuracies, best_shape, path_accuracies, positive
from outrider.training.common.checkpoint import write_json
from outrider.training.data.streams import load_held_out
from outrider.training.data.tokenizer import load_tokenizer
from outrider.training.draft.drafts import load_target, num_common_ids
from outrider.training.heads.directory import read_heads
from outrider.training.heads.model import Heads
from outrider.training.heads.rounds import (
    Choices,
    cartesian_shape,
    cartesian_widths,
    expected_tokens,
    replayed_tokens_a_round,
)
from outrider.training.judge.target_text import WrittenText, written_texts

_TREE_NODES = 64  # of tree.json: more than a verifier on a CPU ever wants


class HeadsJudge:
    """Holds heads and their target, loaded once."""

    def __init__(self, heads: Heads, target_dir: Path) -> None:
        self.heads, self.target = heads.eval(), load_target(target_dir, torch.float32)
        num_ids = num_common_ids(target_dir, self.target)
        self._output_embedding = self.target.get_output_embeddings().weight[:num_ids]

    @torch.no_grad()
    def choices(self, text: WrittenText) -> Choices:
        """Returns the choices by score, and above temperature 0 the noise of the text's seed, that the text took."""
        ids = torch.tensor([[*text.prompt, *text.new]])
        hidden = self.target.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        embedded = self.target.get_input_embeddings()(ids)[0]
        first, num_heads = len(text.prompt), self.heads.shape.num_heads
        found: Choices = [[] for _ in text.new[1:]]
        noise = [self._noise(text, first + offset) for offset in range(len(text.new))]
        for index in range(num_heads):
            num_starts = len(text.new) - 1 - index
            if num_starts < 1:
                break
            starts = torch.arange(first - 1, first - 1 + num_starts)
            following = [embedded[starts + step] for step in range(1, index + 2)]
            rows = self.heads.row(index, hidden[starts], following) @ self._output_embedding.T
            for start, row in enumerate(rows / (text.sampling.temperature or 1.0)):
                offset = start + 1 + index
                found[start].append(_rank(row + noise[offset], text.new[offset]))
        return found

    def _noise(self, text: WrittenText, position: int) -> Tensor:
        if not text.sampling.temperature:
            return torch.zeros(len(self._output_embedding))
        return torch.from_numpy(gumbel_row(text.sampling.seed, position, len(self._output_embedding)))


def _rank(scores: Tensor, token_id: int) -> int:
    better = int((scores > scores[token_id]).sum()) + int((scores[:token_id] == scores[token_id]).sum())
    return min(better, MAX_CONTINUATIONS)


@dataclass(frozen=True)
class Judgement:
    """Holds the figures of one temperature on the text that is judged."""

    temperature: float
    num_texts: int
    num_tokens: int
    first_choices: list[float]
    """How often each head's first choice is right, whatever came before."""
    expected_tokens: float
    """Tokens a round of the calibrated tree, from the accuracies of the text it was calibrated on."""
    tokens_a_round: float
    """Replayed."""
    cartesian_tokens_a_round: float
    """Replayed, with the best cartesian tree of no more nodes."""


def judge(args: argparse.Namespace) -> list[Judgement]:
    """Writes tree.json and evaluation.json, and returns the figures. Raises `UsageError`, `ModelError` and ValueError
    for what cannot be used."""
    heads, config = read_heads(args.heads)
    if config["outrider"]["target_fingerprint"] != (fingerprint := target_fingerprint(args.target)):
        raise UsageError(f"--heads {args.heads} are of another target than --target {args.target}")
    calibration, judged = prompts_of(args)
    judge = HeadsJudge(heads, args.target)
    backend = load_backend(args.target)

    def choices(prompts: Sequence[TokenIds], temperature: float) -> list[Choices]:
        texts = written_texts(backend, prompts, temperature, args.num_new_tokens)
        return [judge.choices(text) for text in texts]

    known = {each: choices(calibration, each) for each in args.temperature}
    by_temperature = {each: _accuracies(texts, heads) for each, texts in known.items()}
    pooled = _accuracies([text for texts in known.values() for text in texts], heads)
    tree, _ = best_shape(pooled, _TREE_NODES)
    shape, widths = tree[: args.num_nodes], cartesian_widths(pooled, args.num_nodes)
    figures = []
    for temperature in args.temperature:
        texts = choices(judged, temperature)
        figures.append(
            Judgement(
                temperature,
                len(texts),
                sum(map(len, texts)),
                _first_choices(texts, heads.shape.num_heads),
                expected_tokens(by_temperature[temperature], shape),
                replayed_tokens_a_round(texts, shape),
                replayed_tokens_a_round(texts, cartesian_shape(widths)),
            )
        )
    rounded = [[round(each, 4) for each in row] for row in pooled]
    about = {"temperatures": args.temperature, "target_fingerprint": fingerprint, "accuracies": rounded}
    (args.heads / "tree.json").write_text(json.dumps({"choices": tree, "about": about}) + "\n", "utf-8")
    record = {
        "num_nodes": args.num_nodes,
        "cartesian_widths": widths,
        "judged": [asdict(each) for each in figures],
    }
    write_json(args.heads / "evaluation.json", record)
    return figures


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


def _accuracies(texts: Sequence[Choices], heads: Heads) -> Accuracies:
    return path_accuracies((path for choices in texts for path in choices), heads.shape.num_heads)


def _first_choices(texts: Sequence[Choices], num_heads: int) -> list[float]:
    paths = [path for choices in texts for path in choices]
    return [
        round(float(np.mean([path[index] == 0 for path in paths if len(path) > index])), 4)
        for index in range(num_heads)
    ]


def parse_args(arguments: list[str]) -> argparse.Namespace:
    """Returns the options; exits naming what is wrong with them."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.heads.judge",
        description="Judge heads on text of their target, and choose the shape of their trees.",
    )
    parser.add_argument("--heads", type=Path, required=True, help="--out of the training")
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face directory with tokenizer")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", type=Path, nargs="+", help="files of text, or .jsonl, not trained on")
    text.add_argument("--data", type=Path, help="encoded corpus of `make pair`: its held-out files")
    parser.add_argument("--judge-text", type=Path, nargs="+", help="default: half of the passages of --text")
    parser.add_argument("--num-nodes", type=positive, default=16, metavar="N", help="of the tree judged")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8], metavar="T")
    parser.add_argument("--num-passages", type=positive, default=80, metavar="N")
    parser.add_argument("--num-prompt-tokens", type=positive, default=32, metavar="N")
    parser.add_argument("--num-new-tokens", type=positive, default=96, metavar="N", help="after each passage")
    return parser.parse_args(arguments)


def main() -> None:
    """Runs the command."""
    args = parse_args(sys.argv[1:])
    try:
        figures = judge(args)
    except (UsageError, ModelError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    for each in figures:
        print(
            f"temperature {each.temperature}: {each.tokens_a_round:.2f} tokens a round of {args.num_nodes} nodes "
            f"({each.expected_tokens:.2f} expected), {each.cartesian_tokens_a_round:.2f} of the cartesian tree; "
            f"first choices right {', '.join(f'{rate:.2f}' for rate in each.first_choices)}"
        )


if __name__ == "__main__":
    main()
