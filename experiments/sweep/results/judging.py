"""After measuring, the target looks at the texts: ties are separated from differences, others are scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from outrider.cloud_verifier.config import EMBEDDED_TARGET
from outrider.common.noise.draws import gumbel_row
from outrider.common.sampling.processors import process_logits
from outrider.common.types import SamplingParams, TokenIds
from outrider.edge_client.config.run_config import default_draft_dir
from outrider.edge_client.session.factory import make_sampling
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.prompts import Prompt
from outrider.experiments.sweep.config.cells import Cell
from outrider.experiments.sweep.config.schema import SweepConfig
from outrider.experiments.sweep.config.settings import make_edge_config
from outrider.experiments.sweep.results.intervals import of_ratio
from outrider.experiments.sweep.results.records import Metric, RequestRow

TIE_SCORE = 1e-4  # docs/design.md §7, numerics: what two float32 forwards of different shape may differ by


class Scorer:
    """Loads the target's weights. `fingerprint` says whether it is the one that wrote."""

    def __init__(self, target: Path) -> None:
        from outrider.cloud_verifier.backends.loading import load_target

        self._backend = load_target(target)
        self.fingerprint = self._backend.fingerprint

    def is_tie(
        self, prompt_ids: Sequence[int], written: Sequence[int], a: int, b: int, sampling: SamplingParams
    ) -> bool:
        """Returns whether after prompt and `written` the target could choose `a` as well as `b`, noise
        included."""
        scores = self._scores(prompt_ids, written, 1, sampling)[0]
        return bool(abs(scores[a] - scores[b]) < TIE_SCORE)

    def unlike(
        self, prompt_ids: Sequence[int], written: Sequence[int], sampling: SamplingParams
    ) -> list[int]:
        """Returns which of the written tokens the target would not have chosen after those before them, ties
        left out. The parameters may not count tokens: no penalties, no least length."""
        if not written:
            return []
        scores = self._scores(prompt_ids, written[:-1], len(written), sampling)
        chosen = scores[np.arange(len(written)), list(written)]
        return np.flatnonzero(scores.max(axis=1) - chosen >= TIE_SCORE).tolist()

    def _scores(
        self, prompt_ids: Sequence[int], written: Sequence[int], num_rows: int, sampling: SamplingParams
    ) -> np.ndarray:
        """Returns the processed logits after the last `num_rows` tokens, with noise: [num_rows, vocab]."""
        text = [*prompt_ids, *written]
        rows = []
        for row, logits in enumerate(self._logits(text, num_rows)):
            position = len(text) - num_rows + row + 1
            named = {"prompt_ids": prompt_ids, "output_ids": text[len(prompt_ids) : position]}
            num_tokens = self._backend.num_tokens
            scores = process_logits(np, logits[None], sampling, num_tokens=num_tokens, **named)
            noise = gumbel_row(sampling.seed, position, scores.shape[1]) if sampling.temperature else 0.0
            rows.append(scores[0].astype(np.float64) + noise)
        return np.stack(rows)

    def nats(self, prompt_ids: Sequence[int], written: Sequence[int]) -> float:
        """Returns the loss of the written tokens, summed, under the target's own distribution at
        temperature 1."""
        if not written:
            return 0.0
        rows = self._logits([*prompt_ids, *written[:-1]], len(written)).astype(np.float64)
        rows = rows[:, : self._backend.num_tokens]
        rows -= rows.max(axis=1, keepdims=True)
        chosen = rows[np.arange(len(written)), list(written)]
        return float((np.log(np.exp(rows).sum(axis=1)) - chosen).sum())

    def _logits(self, token_ids: list[int], num_rows: int) -> np.ndarray:
        from outrider.cloud_verifier.backends.base import ForwardItem, open_sequence

        with open_sequence(self._backend) as sequence:
            return np.asarray(self._backend.forward([ForwardItem(sequence, token_ids, num_rows)]))


class Judge:
    """Loads tokenizer and target when first asked. Without the right target here it judges nothing."""

    def __init__(self, config: SweepConfig, cells: Sequence[Cell], prompts: Sequence[Prompt]) -> None:
        self._config = config
        self._cells = {cell.id: cell for cell in cells}
        self._prompts = {prompt.id: prompt.text for prompt in prompts}
        self._scorer: Scorer | None = None
        self._seen: set[str] = set()  # fingerprints of targets that wrote
        self._tokenizer: EdgeTokenizer | None = None

    def is_tie(self, row: RequestRow, index: int, token_id: int) -> bool | None:
        """Returns whether the row's token at `index` and `token_id` were the same to the target."""
        scorer = self._scorer_for(row)
        if scorer is None:
            return None
        settings = self._cells[row.cell].edge_settings(self._config.edge_settings)
        config = make_edge_config(settings)
        words = tuple(tuple(self._encode(word)) for word in config.sampling.bad_word)
        sampling = make_sampling(config, row.seed, words)
        ids, written = self._encode(self._prompts[row.prompt]), row.token_ids
        return scorer.is_tie(ids, written[:index], written[index], token_id, sampling)

    def losses(self, rows: Mapping[str, Sequence[RequestRow]]) -> dict[str, Metric]:
        """Returns target_nats_per_token of cells whose text is not cloud-only's, and of cloud-only beside
        them."""
        found: dict[str, Metric] = {}
        known: dict[tuple[str, str], float] = {}  # the same text comes from many cells
        inexact = {id for id, cell in self._cells.items() if not _is_exact(cell, rows.get(id, ()))}
        for cell in self._cells.values() if inexact else ():
            texts = [row for row in rows.get(cell.id, ()) if row.token_ids]
            if (cell.id not in inexact and cell.mode != "cloud-only") or not texts:
                continue
            for row in texts:
                key = row.prompt, row.token_hash
                if key not in known:
                    scorer = self._scorer_for(row)
                    if scorer is None:
                        return found
                    known[key] = scorer.nats(self._encode(self._prompts[row.prompt]), row.token_ids)
            nats = [known[row.prompt, row.token_hash] for row in texts]
            result = of_ratio(nats, [row.num_tokens for row in texts])
            if result is not None:
                value, interval = result
                low, high = interval or (None, None)
                found[cell.id] = Metric(round(value, 5), "nats", low, high, len(texts))
        return found

    def _scorer_for(self, row: RequestRow) -> Scorer | None:
        """Returns None for synthetic models, and where the target that wrote is not the one at hand."""
        if self._config.is_synthetic:
            return None
        if self._scorer is None:
            named = self._config.model_dirs.get("target")
            self._scorer = Scorer(Path(named) if named else EMBEDDED_TARGET)
        if row.target_fingerprint:  # edge-only asked no target: it is judged by the one the others had
            self._seen.add(row.target_fingerprint)
        return self._scorer if self._seen <= {self._scorer.fingerprint} else None

    def _encode(self, text: str) -> TokenIds:
        if self._tokenizer is None:
            directory = Path(self._config.model_dirs.get("draft") or default_draft_dir())
            self._tokenizer = EdgeTokenizer(directory / "tokenizer.json")
        return tuple(self._tokenizer.encode(text))


def _is_exact(cell: Cell, rows: Sequence[RequestRow]) -> bool:
    return cell.is_exact_text and not any(row.num_unverified_tokens for row in rows)
