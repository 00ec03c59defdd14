"""Rounds of drafts against texts of a target.

With shared noise the target's text depends on no draft, so a round is judged by the text alone: accepted is what
agrees with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from outrider.common.tree import ROOT, Tree
from outrider.common.types import TokenIds
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.onnx.sequence import OnnxDraftSequence
from outrider.edge_client.drafting.trees import TreeBudget, TreeDraft
from outrider.training.judge.target_text import WrittenText


@dataclass(slots=True)
class Rounds:
    """Counts what rounds of one way to draft brought."""

    num_rounds: int = 0
    num_tokens: int = 0
    num_nodes: int = 0
    num_runs: int = 0

    @property
    def tokens_a_round(self) -> float:
        """Returns the committed tokens of a round."""
        return self.num_tokens / self.num_rounds


Propose = Callable[[OnnxDraftSequence], tuple[Tree, TokenIds, TreeDraft | None]]


def chain(num_draft_tokens: int) -> Propose:
    """Returns how a chain is proposed."""

    def propose(sequence: OnnxDraftSequence) -> tuple[Tree, TokenIds, TreeDraft | None]:
        token_ids = sequence.propose(num_draft_tokens).token_ids
        return Tree(range(-1, len(token_ids) - 1)), token_ids, None

    return propose


def tree(budget: TreeBudget, values: NodeValues) -> Propose:
    """Returns how a tree is proposed."""

    def propose(sequence: OnnxDraftSequence) -> tuple[Tree, TokenIds, TreeDraft | None]:
        draft = sequence.propose_tree(budget, values)
        return Tree(draft.parents), draft.token_ids, draft

    return propose


def play(
    model: DraftModel, texts: Sequence[WrittenText], propose: Propose, learning: NodeValues | None = None
) -> Rounds:
    """Returns the rounds of all texts. `learning` observes each verdict."""
    rounds = Rounds()
    for text in texts:
        sequence = model.sequence(text.sampling, num_prompt_tokens=len(text.prompt))
        assert isinstance(sequence, OnnxDraftSequence), "trees are drafted by an exported model"
        sequence.commit([*text.prompt, text.new[0]])  # the opening brings the first token
        done = 1
        while done < len(text.new):
            shape, token_ids, draft = propose(sequence)
            left = text.new[done:]
            accepted = accepted_nodes(shape, token_ids, left)
            committed = left[: len(accepted) + 1]
            if learning is not None and draft is not None:
                learning.observe(draft, accepted, left[len(accepted)] if len(accepted) < len(left) else None)
            sequence.commit(committed)
            done += len(committed)
            rounds.num_rounds += 1
            rounds.num_tokens += len(committed)
            rounds.num_nodes += len(token_ids)
            rounds.num_runs += draft.num_runs if draft is not None else len(token_ids)
        sequence.close()
    return rounds


def play_fitted(model: DraftModel, texts: Sequence[WrittenText], budget: TreeBudget) -> Rounds:
    """Returns the rounds of trees whose values were fitted on one half of the texts and are judged on the other,
    and the reverse."""

    def play_half(fitted: Sequence[WrittenText], judged_on: Sequence[WrittenText]) -> Rounds:
        values = NodeValues()
        play(model, fitted, tree(budget, values), learning=values)
        return play(model, judged_on, tree(budget, values))

    return over_halves(texts, play_half)


def over_halves(
    texts: Sequence[WrittenText],
    play_half: Callable[[Sequence[WrittenText], Sequence[WrittenText]], Rounds],
) -> Rounds:
    """Returns the rounds on both halves of the texts, of what is fitted on the other one each."""
    halves = texts[::2], texts[1::2]
    parts = [asdict(play_half(*each)) for each in (halves, halves[::-1])]
    return Rounds(**{name: sum(part[name] for part in parts) for name in parts[0]})


def figures(rounds: Rounds) -> dict[str, float]:
    """Returns means over rounds, and how many there were."""
    return {
        "tokens_per_round": round(rounds.tokens_a_round, 3),
        "nodes_per_round": round(rounds.num_nodes / rounds.num_rounds, 2),
        "runs_per_round": round(rounds.num_runs / rounds.num_rounds, 2),
        "num_rounds": rounds.num_rounds,
    }


def accepted_nodes(shape: Tree, token_ids: Sequence[int], text: Sequence[int]) -> list[int]:
    """Returns the nodes of the longest path that begins `text`."""
    accepted: list[int] = []
    node = ROOT
    for token_id in text:
        found = next((child for child in shape.children(node) if token_ids[child] == token_id), None)
        if found is None:
            break
        accepted.append(found)
        node = found
    return accepted
