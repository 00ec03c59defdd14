"""Tells on the device what may follow the nodes of trees: only the likeliest ids come to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.cloud_verifier.verification.staging import upload
from outrider.common.errors import ModelError
from outrider.common.noise.philox import Purpose
from outrider.edge_client.drafting.rows.sampler import MOST_GAP, NOT_FINITE
from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS, Continuations
from outrider.kernels.device_top import coupled_tops


@dataclass(frozen=True, slots=True)
class TopOf:
    """Names a row of logits, what it is scored with, and what is learned of it together (`Continuations.source`)."""

    row: int
    temperature: float
    seed: int  # of the noise that both sides share
    position: int
    source: str


def read_tops(
    logits: torch.Tensor, num_tokens: int, asked: Sequence[TopOf]
) -> list[Continuations | ModelError]:
    """Returns what `DraftSampler.continuations` would tell of rows of logits [n, vocab_size] on a device, where no
    more than a temperature is applied, or what it would raise."""
    if not asked:
        return []
    keys = [(each.seed, Purpose.COUPLED, each.position, 0) for each in asked]
    rows, temperatures, noise_keys = upload(
        [
            np.array([each.row for each in asked], np.int64),
            np.array([each.temperature for each in asked], np.float32),
            np.array(keys, np.uint64).view(np.int64),
        ],
        logits.device,
    )
    largest, tokens = coupled_tops(logits[rows], num_tokens, temperatures, noise_keys, MAX_CONTINUATIONS)
    found = torch.stack((largest.double(), tokens.double()), dim=1).cpu().tolist()
    return [_told(sums, ids, of.source) for (sums, ids), of in zip(found, asked, strict=True)]


def _told(sums: list[float], ids: list[float], source: str) -> Continuations | ModelError:
    if math.isnan(sums[0]):
        return ModelError(NOT_FINITE)
    kept = [(int(token_id), sums[0] - each) for each, token_id in zip(sums, ids, strict=True)]
    kept = [(token_id, gap) for token_id, gap in kept if gap <= MOST_GAP]  # nothing where all are -inf
    return Continuations(tuple(each for each, _ in kept), tuple(gap for _, gap in kept), source)
