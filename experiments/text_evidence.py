"""Whether a prompt, or the draft's own confidence, says how much of drafts will stand in the text behind it.

python -m outrider.experiments.text_evidence

Over the recorded texts: the correlation of each sign with the share of first drafted tokens that stand in the
text. The draft could have read all of them before the verifier's first answer. `judged` is the share that
stood of the first tokens, which only the verifier tells, with that of the rest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.controller.record_acceptance import SEED, TEMPERATURES
from outrider.common.types import SamplingParams, TokenIds
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.acceptance_traces import TextTrace, load_traces
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.prompts import load_prompts
from outrider.models import EMBEDDED

NUM_PROMPT = 32  # last tokens of a prompt
NUM_FIRST = 16  # first tokens of a text

Floats = NDArray[np.float64]


def prompt_signs(draft: DraftModel, prompt_ids: TokenIds, sampling: SamplingParams) -> tuple[float, float]:
    """Over the prompt's last tokens: the share that the draft would have said, and how sure it was."""
    num = min(NUM_PROMPT, len(prompt_ids) - 1)
    sequence = draft.sequence(sampling, num_prompt_tokens=0)
    sequence.commit(prompt_ids[:-num])
    agreed, confidences = 0, []
    for token_id in prompt_ids[-num:]:
        drafted = sequence.propose(1)
        agreed += drafted.token_ids[0] == token_id
        confidences.append(np.exp(-drafted.signals[0].nll))
        sequence.commit((token_id,))
    sequence.close()
    return agreed / num, float(np.mean(confidences))


def stood(texts: tuple[TextTrace, ...], first: int = 0, end: int | None = None) -> Floats:
    return np.array([np.mean(text.runs[first:end] > 0) for text in texts])


def main() -> int:
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    with OnnxDraftModel.open(EMBEDDED / "draft") as draft:
        for traces, temperature in zip(load_traces(), TEMPERATURES, strict=True):
            sampling = SamplingParams(temperature=temperature, seed=SEED)
            prompts = [tuple(tokenizer.encode(p.text)) for p in load_prompts(limit=len(traces.texts))]
            agreed, sure = np.array([prompt_signs(draft, prompt, sampling) for prompt in prompts]).T
            own = np.array([text.confidences[0, :NUM_FIRST].mean() for text in traces.texts])
            all_stood = stood(traces.texts)
            first, rest = stood(traces.texts, 0, NUM_FIRST), stood(traces.texts, NUM_FIRST)
            mean, num = all_stood.mean(), traces.texts[0].num_positions
            pairs = {
                f"prompt agreed ({agreed.mean():.2f})": (agreed, all_stood),
                "prompt confidence": (sure, all_stood),
                f"confidence of the first {NUM_FIRST} drafted": (own, all_stood),
                "judged": (first, rest),
            }
            luck = np.sqrt(mean * (1 - mean) / num)
            print(f"{traces.name}: texts' acceptances differ by {all_stood.std():.3f}, by luck {luck:.3f}")
            for name, (sign, value) in pairs.items():
                print(f"  {name:<40}{np.corrcoef(sign, value)[0, 1]:>6.2f}")
    return 0


if __name__ == "__main__":
    run_command("text_evidence", main)
