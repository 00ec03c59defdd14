"""What heads choose on text of their target, and the figures that follow from it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.cloud_verifier.backends.model_ends import embed, score
from outrider.common.noise.draws import gumbel_row
from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS
from outrider.training.calibrate_tree import best_shape, path_accuracies
from outrider.training.common.checkpoint import write_json
from outrider.training.draft.drafts import load_target, num_common_ids
from outrider.training.heads.model import Heads
from outrider.training.heads.rounds import (
    Choices,
    cartesian_shape,
    cartesian_widths,
    expected_tokens,
    replayed_tokens_a_round,
)
from outrider.training.judge.target_text import WrittenText

_TREE_NODES = 64  # of tree.json: more than a verifier on a CPU ever wants


class HeadsJudge:
    """Holds the target, loaded once."""

    def __init__(self, target_dir: Path) -> None:
        self.target = load_target(target_dir, torch.float32)
        self._num_ids = num_common_ids(target_dir, self.target)

    @torch.no_grad()
    def choices(self, heads: Heads, text: WrittenText) -> Choices:
        """Returns the choices by score, and above temperature 0 the noise of the text's seed, that the text took."""
        ids = torch.tensor([[*text.prompt, *text.new]])
        hidden = self.target.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        embedded = embed(self.target, ids[0])
        first, num_heads = len(text.prompt), heads.shape.num_heads
        found: Choices = [[] for _ in text.new[1:]]
        noise = [self._noise(text, first + offset) for offset in range(len(text.new))]
        for index in range(num_heads):
            num_starts = len(text.new) - 1 - index
            if num_starts < 1:
                break
            starts = torch.arange(first - 1, first - 1 + num_starts)
            following = [embedded[starts + step] for step in range(1, index + 2)]
            rows = score(self.target, heads.row(index, hidden[starts], following))[:, : self._num_ids]
            for start, row in enumerate(rows / (text.sampling.temperature or 1.0)):
                offset = start + 1 + index
                found[start].append(_rank(row + noise[offset], text.new[offset]))
        return found

    def _noise(self, text: WrittenText, position: int) -> Tensor:
        if not text.sampling.temperature:
            return torch.zeros(self._num_ids)
        return torch.from_numpy(gumbel_row(text.sampling.seed, position, self._num_ids))


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


Texts = dict[float, tuple[list[WrittenText], list[WrittenText]]]
"""By temperature, what the target wrote to calibrate on and to judge on."""


def judge_heads(
    judge: HeadsJudge, heads: Heads, texts: Texts, num_nodes: int, directory: Path
) -> list[Judgement]:
    """Writes the two files of one directory, and returns its figures by temperature."""
    num_heads = heads.shape.num_heads
    known = {
        temperature: [path for text in calibration for path in judge.choices(heads, text)]
        for temperature, (calibration, _) in texts.items()
    }
    pooled = path_accuracies((path for paths in known.values() for path in paths), num_heads)
    tree, _ = best_shape(pooled, _TREE_NODES)
    shape, widths = tree[:num_nodes], cartesian_widths(pooled, num_nodes)
    figures = []
    for temperature, (_, judged) in texts.items():
        choices = [judge.choices(heads, text) for text in judged]
        figures.append(
            Judgement(
                temperature,
                len(choices),
                sum(map(len, choices)),
                _first_choices(choices, num_heads),
                expected_tokens(path_accuracies(known[temperature], num_heads), shape),
                replayed_tokens_a_round(choices, shape),
                replayed_tokens_a_round(choices, cartesian_shape(widths)),
            )
        )
    rounded = [[round(each, 4) for each in row] for row in pooled]
    about = {"temperatures": list(texts), "num_tokens": sum(map(len, known.values())), "accuracies": rounded}
    (directory / "tree.json").write_text(json.dumps({"choices": tree, "about": about}) + "\n", "utf-8")
    record = {
        "num_nodes": num_nodes,
        "cartesian_widths": widths,
        "judged": [asdict(each) for each in figures],
    }
    write_json(directory / "evaluation.json", record)
    return figures


def _first_choices(texts: Sequence[Choices], num_heads: int) -> list[float]:
    paths = [path for choices in texts for path in choices]
    return [
        round(float(np.mean([path[index] == 0 for path in paths if len(path) > index])), 4)
        for index in range(num_heads)
    ]
