"""Early exit: the target drafts by some of its own layers, with its own norm and output embedding.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) drafts by the first layers of a target that was trained for it; Draft
& Verify (Zhang et al. 2023, arXiv 2309.08168) leaves out layers of any target. There are no weights: what is drafted is
run ahead of the forward that verifies it, which goes on from the states after the first layers (`passes.partial`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.cloud_verifier.backends.base import KVSequence
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.passes.partial import AheadToken, SkipsLayers
from outrider.cloud_verifier.heads.directory import HeadDirectory
from outrider.cloud_verifier.heads.source import WantedDraft
from outrider.common.types import EARLY_EXIT, Draft, SamplingParams
from outrider.edge_client.drafting.base import ShouldStop, ended
from outrider.edge_client.drafting.rows.rows import Rows, rows_of
from outrider.edge_client.drafting.rows.sampler import DraftSampler
from outrider.edge_client.drafting.rows.sequence import Chain, SampledText

DEFAULT_CHAIN = 4  # tokens drafted where a tree is asked for, which is not drafted here


class EarlyExit:
    """Implements `DraftSource` and `DraftsTogether`: some layers of the target."""

    name = EARLY_EXIT
    signal_names = ("nll", "entropy", "margin")

    def __init__(self, backend: PagedBackend, layers: Sequence[int], fingerprint: str) -> None:
        """`layers` are numbers of layers, ascending. The backend's decoder is one that `SkipsLayers`."""
        self.backend, self.layers = backend, tuple(layers)
        self.num_tokens, self.max_context = backend.num_tokens, backend.max_context
        self.eos_token_ids = backend.eos_token_ids
        self.fingerprint, self.tokenizer_fingerprint = fingerprint, backend.tokenizer_fingerprint
        backend.entry_layer = num_first(layers)

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> EarlyExitSequence:
        """Returns a new, empty sequence."""
        sampler = DraftSampler(sampling, self.eos_token_ids, num_support)
        return EarlyExitSequence(self, sampler, sampling.temperature, num_prompt_tokens)

    @torch.inference_mode()
    def propose_together(
        self, sequences: Sequence[EarlyExitSequence], wanted: Sequence[WantedDraft]
    ) -> list[Draft | Exception]:
        """See `DraftsTogether.propose_together`: a token of every sequence is one run of the layers."""
        nums = [min(each.num_tokens, DEFAULT_CHAIN) if each.budget else each.num_tokens for each in wanted]
        drafting = [each for each, num in zip(sequences, nums, strict=True) if each.begin(num)]
        while drafting:
            states, logits = self.backend.run_ahead([each.next_token() for each in drafting], self.layers)
            going_on = []
            for row, each in enumerate(drafting):
                if each.take(states[row : row + 1], logits[row : row + 1, : self.num_tokens]):
                    going_on.append(each)
            drafting = going_on
        return [each.result() for each in sequences]

    def close(self) -> None:
        """Has nothing to free."""

    def __enter__(self) -> EarlyExit:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class EarlyExitSequence(SampledText):
    """Drafts chains of one sequence, whose KV is the target's own.

    `kv` is of all committed tokens but the last before a draft. Then `states` are those of the tokens that were run
    ahead, the last committed one first, after the layers that the next forward need not run for them; None where it
    begins with the first.
    """

    def __init__(
        self, source: EarlyExit, sampler: DraftSampler, temperature: float, num_prompt_tokens: int | None
    ) -> None:
        super().__init__(sampler, source.num_tokens, source.max_context, num_prompt_tokens)
        self.kv: KVSequence | None = None
        self._source, self._temperature = source, temperature
        self._states: list[torch.Tensor] = []
        self._chain: Chain | None = None
        self._error: Exception | None = None

    @property
    def states(self) -> Any:
        """Returns the states [n, hidden_size] of the tokens that the last draft ran ahead."""
        return torch.cat(self._states) if self._states and self._source.backend.entry_layer else None

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """Samples a chain."""
        (draft,) = self._source.propose_together([self], [WantedDraft(num_draft_tokens)])
        if isinstance(draft, Exception):
            raise draft
        return ended(draft, should_stop)

    def begin(self, num_draft_tokens: int) -> bool:
        """Begins a chain; returns whether there is room for one, in the context and in the KV pool."""
        assert self.kv is not None and self.kv.length == len(self._text) - 1, (
            "KV is of all tokens but the last"
        )
        num_tokens = min(num_draft_tokens, self._max_context - len(self._text))
        has_room = num_tokens > 0 and self._source.backend.reserve(self.kv, num_tokens + 1)
        self._chain = self.begin_chain(num_tokens) if has_room else None
        self._states, self._error = [], None
        return has_room

    def next_token(self) -> AheadToken:
        """Returns the token whose row is the next one's: the last one committed or drafted."""
        assert self._chain is not None and self.kv is not None, "a chain was begun"
        drafted = self._chain.token_ids
        return AheadToken(self.kv, len(drafted), drafted[-1] if drafted else self._text[-1])

    def take(self, state: torch.Tensor, logits: torch.Tensor) -> bool:
        """Drafts a token from what was computed of the last one, [1, hidden_size] and [1, num_tokens]; returns whether
        there is to be one after it."""
        assert self._chain is not None, "a chain was begun"
        self._states.append(state)
        try:
            goes_on = self._chain.add(self._rows(logits))
            del self._states[len(self._chain.token_ids) :]  # a grammar may end the chain before this token
            return goes_on
        except Exception as error:  # of this sequence's sampling alone
            self._error = error
            return False

    def result(self) -> Draft | Exception:
        """Returns the draft, empty where there was no room, or what went wrong with it."""
        if self._error is not None:
            self._states, self._chain = [], None
            return self._error
        return Draft((), ()) if self._chain is None else self._chain.draft()

    def close(self) -> None:
        """Gives back the slots that are reserved for a draft."""
        if self.kv is not None:
            self._source.backend.release_reserved(self.kv)
        self.kv, self._states, self._chain = None, [], None

    def check_integrity(self) -> None:
        """Asserts that states are of drafted tokens."""
        assert self._chain is None or len(self._states) == len(self._chain.token_ids), "states without tokens"

    def _rows(self, logits: torch.Tensor) -> Rows:
        return rows_of(logits.cpu().numpy(), self._temperature)


def num_first(layers: Sequence[int]) -> int:
    """Returns how many of the first layers are among some without a gap: those whose work a forward need not repeat."""
    return next((place for place, layer in enumerate(layers) if layer != place), len(layers))


def read_early_exit(directory: HeadDirectory, backend: PagedBackend) -> EarlyExit:
    """Returns the layers of the target that a directory names. Raises `ModelError` where they are none, or where the
    target is run by a decoder that cannot leave layers out."""
    layers, num_layers = directory.config["outrider"].get("layers"), backend.facts.num_layers
    is_list = isinstance(layers, list) and all(type(each) is int for each in layers)
    if not is_list or not layers or layers != sorted(set(layers)):
        raise directory.error(f"config.json: layers is {layers!r}; want numbers of layers, ascending")
    if layers[0] < 0 or layers[-1] >= num_layers or len(layers) == num_layers:
        raise directory.error(
            f"config.json: layers is {layers}; want some of 0 to {num_layers - 1}, and not all"
        )
    if not isinstance(backend.decoder, SkipsLayers):
        raise directory.error(
            "early exit wants our own decoder on a CPU (--device cpu, an architecture of docs/operations.md)"
        )
    return EarlyExit(backend, layers, directory.fingerprint)
