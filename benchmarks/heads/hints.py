"""`heads.hints`: what Medusa's choices, sent to the edge with each verdict, could add to its tree: a bound.

Texts are cloud-only's, cut into rounds as an edge would: a tree of 16 nodes by the embedded draft, of which the path
that the text takes is accepted. With hints the path goes on, beyond the tree, for as long as the text's next token is
among a head's first choices for that place. None of these cost a node here; an edge would verify them instead of some
of its own, so it gains less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch

from benchmarks.heads.embedded import load_prompt_ids
from benchmarks.heads.service import NUM_NODES
from benchmarks.results_file import Found
from benchmarks.trees.texts import accepted_nodes
from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.heads.loading import load_head
from outrider.cloud_verifier.heads.modules import MedusaHead
from outrider.cloud_verifier.heads.sequence import Head
from outrider.common.tree import Tree
from outrider.common.types import TokenIds
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.rows.rows import rows_of
from outrider.edge_client.drafting.rows.sampler import DraftSampler
from outrider.edge_client.drafting.trees import DEFAULT_DEPTH, DEFAULT_WIDTH, TreeBudget
from outrider.experiments.shared.results import at_least, judged
from outrider.models import EMBEDDED
from outrider.training.judge.target_text import WrittenText, written_texts

NUM_PROMPTS, NUM_NEW, NUM_HINTS = 24, 96, 8
BUDGET = TreeBudget(NUM_NODES, DEFAULT_DEPTH, DEFAULT_WIDTH)

Hints = Sequence[Sequence[TokenIds]]  # by the token before a round, by depth: a head's first choices


def run() -> Found:
    """Returns the measures."""
    backend = load_target(EMBEDDED / "target", num_threads=1)
    head = load_head(EMBEDDED / "heads" / "medusa", backend)
    assert isinstance(head, Head), "Medusa's heads have weights"
    gains = {}
    with OnnxDraftModel.open(EMBEDDED / "draft") as draft:
        for temperature in (0.0, 0.8):
            texts = list(written_texts(backend, load_prompt_ids(NUM_PROMPTS), temperature, NUM_NEW))
            hints = [list(_hints(head, text)) for text in texts]
            values = NodeValues()
            _play(draft, texts[::2], [()] * len(texts[::2]), values, learns=True)
            others = texts[1::2]
            alone = _play(draft, others, [()] * len(others), values)
            gains[f"T={temperature:g}"] = round(_play(draft, others, hints[1::2], values) / alone, 3)
    what = (
        f"tokens a round of an edge's tree of {NUM_NODES} nodes with the first {NUM_HINTS} choices of Medusa's heads "
        f"for nothing : without, temperature .8 (at 0: {gains['T=0']})"
    )
    return [judged("heads.hints", what, gains["T=0.8"], "ratio", at_least(1.05))], {"hints": gains}


def _hints(head: Head, text: WrittenText) -> Iterator[list[TokenIds]]:
    """Yields the choices that a verdict would bring down, for each new token that it may end with."""
    backend, num_prompt = head.backend, len(text.prompt)
    token_ids = [*text.prompt, *text.new]
    sequence = backend.new_sequence()
    backend.forward([ForwardItem(sequence, token_ids, 0)])
    features = head.last_features(slice(0, len(token_ids)))
    backend.close(sequence)
    with torch.inference_mode():
        heads = [cast("MedusaHead", each) for each in head.weights.children()]
        logits = [
            (each.output or backend.decoder.score)(each(features))[:, : backend.num_tokens].float().numpy()
            for each in heads
        ]
    sampler = DraftSampler(text.sampling, backend.eos_token_ids)
    for position in range(num_prompt, len(token_ids)):
        rows = (rows_of(each[position - 1 : position], text.sampling.temperature) for each in logits)
        told = (sampler.continuations(row, position + 1, depth) for depth, row in enumerate(rows))
        yield [each.token_ids[:NUM_HINTS] for each in told]


def _play(
    draft: OnnxDraftModel,
    texts: Sequence[WrittenText],
    hints: Sequence[Hints],
    values: NodeValues,
    *,
    learns: bool = False,
) -> float:
    """Returns the tokens a round."""
    num_rounds = num_tokens = 0
    for text, of_text in zip(texts, hints, strict=True):
        sequence = draft.sequence(text.sampling, num_prompt_tokens=len(text.prompt))
        sequence.commit([*text.prompt, text.new[0]])  # the opening brings the first token
        done = 1
        while done < len(text.new):
            found, left = sequence.propose_tree(BUDGET, values), text.new[done:]
            accepted = accepted_nodes(Tree(found.parents), found.token_ids, left)
            num_accepted = len(accepted)
            if learns:
                values.observe(found, accepted, left[num_accepted] if num_accepted < len(left) else None)
            of_round = of_text[done - 1] if of_text else ()
            while (
                num_accepted < min(len(left), len(of_round)) and left[num_accepted] in of_round[num_accepted]
            ):
                num_accepted += 1
            committed = left[: num_accepted + 1]
            sequence.commit(committed)
            done += len(committed)
            num_rounds, num_tokens = num_rounds + 1, num_tokens + len(committed)
        sequence.close()
    return num_tokens / num_rounds
