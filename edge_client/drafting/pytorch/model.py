"""Drafts with a Hugging Face directory in PyTorch: one model, shared by every sequence."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Self

import torch

from outrider.common.errors import ModelError, UsageError
from outrider.common.models.fingerprint import target_fingerprint, tokenizer_fingerprint
from outrider.common.sampling.processors import check_sampling_params
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.backend import TORCH, BackendSettings
from outrider.edge_client.drafting.export.hf_config import read_eos_token_ids
from outrider.edge_client.drafting.pytorch.network import Network, load_network
from outrider.edge_client.drafting.pytorch.probe import check_attention
from outrider.edge_client.drafting.pytorch.runner import TorchRunner
from outrider.edge_client.drafting.rows.kv_sequence import CHUNK_SIZE, KvSequence
from outrider.edge_client.drafting.rows.sampler import DraftSampler
from outrider.edge_client.drafting.spec import TOKENIZER_FILE

_DEVICE_CHUNK_SIZE = 512  # tokens fed at once on an accelerator, whose launches cost more than their products

TorchDraftSequence = KvSequence[TorchRunner]


class TorchDraftModel:
    """Implements `DraftModel`. Sequences may run in parallel threads."""

    signal_names = ("nll", "entropy", "margin")

    def __init__(
        self, network: Network, eos_token_ids: tuple[int, ...], tokenizer_json: Path, source: str
    ) -> None:
        """`source` is the fingerprint of the model that `network` was made of."""
        self.num_tokens, self.max_context = network.num_tokens, network.max_context
        self.eos_token_ids = eos_token_ids
        # What the weights were rounded to is part of the draft's identity, as it is of an exported one's.
        said = f"{source}\0{network.weights}\0{network.dtype}\0{network.has_fp8_kv}"
        self.fingerprint = hashlib.sha256(said.encode()).hexdigest()
        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer_json)
        self.runtime = network.runtime
        self._network: Network | None = network

    @classmethod
    def open(
        cls,
        directory: Path | str,
        settings: BackendSettings | None = None,
        *,
        threads: int = 1,
        first_layers: int | None = None,
    ) -> Self:
        """Loads a Hugging Face directory, or the first layers of its model. On a CPU torch computes with `threads`
        threads from now on, in the whole process.

        Raises `ModelError` naming what is wrong with the directory or its architecture, `UsageError` for settings that
        cannot be used here.
        """
        directory = Path(directory)
        settings = settings or BackendSettings(TORCH)
        if threads < 1:
            raise UsageError(f"a draft needs at least one thread, not {threads}")
        tokenizer = directory / TOKENIZER_FILE
        network = load_network(directory, tokenizer, settings, first_layers)
        if network.device.type == "cpu":
            torch.set_num_threads(threads)
        try:
            check_attention(network)
        except ModelError as error:
            raise ModelError(f"{directory}: {error}") from error
        return cls(network, read_eos_token_ids(directory), tokenizer, target_fingerprint(directory))

    @property
    def network(self) -> Network:
        """Returns the loaded model (the export's check, tests)."""
        assert self._network is not None, "the draft is closed"
        return self._network

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> TorchDraftSequence:
        """Returns a new, empty sequence. Raises `InvalidFieldError` for parameters out of range."""
        check_sampling_params(sampling, self.num_tokens)
        return TorchDraftSequence(
            TorchRunner(self.network, sampling.temperature),
            DraftSampler(sampling, self.eos_token_ids, num_support),
            self.num_tokens,
            self.max_context,
            self.eos_token_ids,
            num_prompt_tokens,
            CHUNK_SIZE if self.network.device.type == "cpu" else _DEVICE_CHUNK_SIZE,
        )

    def close(self) -> None:
        """Releases the weights; open sequences keep them alive until they are closed."""
        self._network = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
