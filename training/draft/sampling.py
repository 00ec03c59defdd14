"""Text from a model, for distilling on what the target itself writes and for judging it. Not a serving
path.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.training.common.compute import Compute
from outrider.training.common.workers import Group


@torch.no_grad()
def continue_rows(
    model: Any,
    prompts: Tensor,
    num_tokens: int,
    temperature: float,
    generator: torch.Generator | None = None,
    num_ids: int | None = None,
) -> Tensor:
    """Continue a batch of equally long prompts, greedily at temperature 0. [rows, prompt] int64 →
    [rows, prompt + num_tokens].

    Only ids below `num_ids` are drawn (default: the whole output embedding, padding included).
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)  # given by place: transformers 5.24 renamed its keyword
    head = model.get_output_embeddings().weight[:num_ids]
    pieces, feed = [prompts], prompts
    for _ in range(num_tokens):
        out = model.model(feed, None, None, cache, use_cache=True).last_hidden_state[:, -1]
        logits = (out.to(head.dtype) @ head.T).float()  # [rows, num_ids]
        if temperature:
            feed = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        else:
            feed = logits.argmax(-1, keepdim=True)
        pieces.append(feed)
    return torch.cat(pieces, dim=1)


def continue_together(
    model: Any,
    prompts: npt.NDArray[np.int64],
    num_tokens: int,
    temperature: float,
    compute: Compute,
    group: Group,
    generator: torch.Generator | None = None,
    num_ids: int | None = None,
) -> Tensor:
    """Runs `continue_rows` by all workers, each its share of the prompts: all rows on every worker, int32
    on the CPU."""
    own = compute.ids(prompts[group.own(len(prompts))])
    with compute.autocast(), torch.compiler.set_stance("force_eager"):  # every step has a new shape
        rows = continue_rows(model, own, num_tokens, temperature, generator, num_ids)
    return group.gather(rows.to("cpu", torch.int32))


@torch.no_grad()
def continue_one(
    model: Any,
    prompt: list[int],
    num_tokens: int,
    temperature: float = 0.0,
    noise: npt.NDArray[np.float32] | None = None,
) -> list[int]:
    """Continue one prompt until `<|endoftext|>` (id 0, included) or `num_tokens`; only the new ids.

    Above temperature 0 the token is argmax(log prob / temperature + noise[i]), noise [num_tokens, vocab]
    Gumbel: the coupled sampling of the wire protocol, with noise the caller chose.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    feed, new = torch.tensor([prompt]), []
    for index in range(num_tokens):
        hidden = model.model(feed, None, None, cache, use_cache=True).last_hidden_state[:, -1]
        scores = (hidden @ model.get_output_embeddings().weight.T)[0]  # [vocab]
        if temperature > 0:
            assert noise is not None, "sampling needs noise"
            scores = scores / temperature + torch.from_numpy(noise[index])
        new.append(int(scores.argmax()))
        if new[-1] == 0:
            break
        feed = torch.tensor([[new[-1]]])
    return new
