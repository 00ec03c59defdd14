"""One measure for many drafts of one target: their INT4 graphs on texts the target wrote once, and what the
cost model makes of it.
"""

import json
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts, tokens_per_s
from outrider.training.common.metrics import acceptance, overlap
from outrider.training.data.prompts import load_prompts
from outrider.training.data.tokenizer import load_tokenizer
from outrider.training.draft.drafts import load_target
from outrider.training.draft.onnx_draft import OnnxDraft
from outrider.training.draft.sampling import continue_one

_MAX_DRAFT_TOKENS = 8
_REMOTE_RTT_S = 0.05


@dataclass(frozen=True)
class Costs:
    """What a round costs beside drafting, in seconds; from `make bench-main` on the machine in question."""

    target_token_s: float
    verify_fixed_s: float
    verify_token_s: float
    overhead_s: float

    @classmethod
    def read(cls, path: Path) -> "Costs":
        """From the benchmark's results. Raises FileNotFoundError naming the path."""
        details = json.loads(path.read_text())["details"]
        parts, forward_ms = details["parts_ms"], details["forwards"]["float32"]["forward_ms"]
        verify_token_ms = (forward_ms["9"] - forward_ms["1"]) / 8
        return cls(
            target_token_s=parts["target_ms"] / 1e3,
            verify_fixed_s=(parts["verify_ms"] - 4 * verify_token_ms) / 1e3,
            verify_token_s=verify_token_ms / 1e3,
            overhead_s=parts["overhead_ms"] / 1e3,
        )

    def of_draft(self, draft_token_s: float) -> ModelCosts:
        """With a draft of that speed."""
        return ModelCosts(draft_token_s, self.target_token_s, self.verify_fixed_s, self.verify_token_s)


@dataclass(frozen=True)
class _Text:
    token_ids: npt.NDArray[np.int64]  # [prompt + new - 1]
    new: npt.NDArray[np.int64]  # [new]
    noise: npt.NDArray[np.float32]  # [new, vocab]
    target_logits: npt.NDArray[np.float32]  # [new, vocab]


class Yardstick:
    """Texts of a target at one temperature, with the noise they were drawn with."""

    def __init__(
        self, target_dir: Path, prompts: Path, costs: Costs, num_prompts: int, num_new: int, seed: int = 0
    ) -> None:
        self._temperature, self._costs = 0.8, costs
        self._target = load_target(target_dir, torch.float32)
        tokenizer = load_tokenizer(target_dir)
        rng = np.random.default_rng(seed)
        heads = [item.prompt for item in load_prompts(prompts)[:num_prompts]]
        self._texts = [self._write(tokenizer.encode(head).ids, num_new, rng) for head in heads]

    def _write(self, prompt: list[int], num_new: int, rng: np.random.Generator) -> _Text:
        noise = rng.gumbel(size=(num_new, self._target.config.vocab_size)).astype(np.float32)
        new = continue_one(self._target, prompt, num_new, self._temperature, noise)
        ids = np.asarray([*prompt, *new[:-1]], dtype=np.int64)
        with torch.no_grad():
            logits = self._target(input_ids=torch.from_numpy(ids)[None]).logits[0, -len(new) :].numpy()
        return _Text(ids, np.asarray(new), noise[: len(new)], logits)

    def measure(self, draft_hf: Path) -> dict[str, Any]:
        """Export a draft to INT4 and judge the graph."""
        from outrider.edge_client.drafting.export.exporter import export_draft

        with tempfile.TemporaryDirectory() as directory:
            report = export_draft(draft_hf, Path(directory))
            draft = OnnxDraft(Path(directory))
            drafted = [draft.logits(text.token_ids)[-len(text.new) :] for text in self._texts]
            draft_token_s = _fastest_token_s(draft, self._texts[0].token_ids)
        pairs = list(zip(self._texts, drafted, strict=True))
        chosen = [(logits / self._temperature + text.noise).argmax(-1) for text, logits in pairs]
        matches = [ids == text.new for text, ids in zip(self._texts, chosen, strict=True)]
        overlaps = [overlap(text.target_logits, logits, self._temperature) for text, logits in pairs]
        agree = [(text.target_logits.argmax(-1) == logits.argmax(-1)).mean() for text, logits in pairs]
        lengths = [len(text.new) for text in self._texts]
        rounds = acceptance(matches, _MAX_DRAFT_TOKENS)
        return {
            "num_parameters": report.num_parameters,
            "num_tokens": sum(lengths),
            "overlap": float(np.average(overlaps, weights=lengths)),
            "agreement": float(np.average(agree, weights=lengths)),
            "tokens_per_round_4": acceptance(matches, 4).tokens_per_round,
            "acceptance_per_position": rounds.per_position,
            "draft_token_ms": draft_token_s * 1e3,
            **self._predict(rounds.per_position, draft_token_s),
        }

    def _predict(self, per_position: list[float], draft_token_s: float) -> dict[str, Any]:
        """Tokens a second of synchronous rounds at the best draft length, on loopback and far away."""
        reached = [1.0, *per_position]
        alphas = [after / before if before else 0.0 for before, after in pairwise(reached)]
        models, found = self._costs.of_draft(draft_token_s), {}
        for name, rtt_s in (("loopback", 0.0), ("rtt_50ms", _REMOTE_RTT_S)):
            link = LinkCosts(rtt_s + self._costs.overhead_s)
            lengths = range(1, _MAX_DRAFT_TOKENS + 1)
            rates = {n: tokens_per_s(alphas, n, models, link) for n in lengths}
            best = max(rates, key=rates.__getitem__)
            found[name] = {"num_draft_tokens": best, "tokens_per_s": rates[best]}
        return found


def _fastest_token_s(draft: OnnxDraft, token_ids: npt.NDArray[np.int64], repeats: int = 40) -> float:
    """The quickest of some passes, a token: what else runs on the machine only ever adds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        draft.logits(token_ids[:64])
        times.append((time.perf_counter() - started) / min(64, len(token_ids)))
    return min(times)
