"""The function that `model.generate` calls in place of its own loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from outrider.common.errors import UsageError
from outrider.edge_client.core.events import TokenEvent
from outrider.edge_client.library.client import Stream, open_stream
from outrider.hf.connections import connection_of
from outrider.hf.request import read_request
from outrider.hf.settings import split_settings


def generate(
    model: Any,
    input_ids: torch.Tensor,
    *,
    generation_config: Any,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Sequence[Any] = (),
    verifier: str | None = None,
    seed: int | None = None,
    stop_strings: str | Sequence[str] = (),
    on_token: Callable[[TokenEvent], object] | None = None,
    tokenizer_dir: str | None = None,
    settings: Mapping[str, object] | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Returns what `model.generate` returns: the ids [1, prompt and new ones], or a `ModelOutput` with them.

    `model` drafts, through a KV cache of its own; the text is that of the target at `verifier` (HOST:PORT). `seed` is
    that of the target's samples; without one it is drawn from torch's generator, which `torch.manual_seed` sets.
    `on_token` is called in this thread with each `outrider.TokenEvent`. `tokenizer_dir` has the model's tokenizer.json,
    where the directory it was loaded from has none. `settings` are those of `outrider.connect` but for drafts and
    sampling. The rest is handed over by transformers.

    Raises `UsageError` for what cannot be done, by name, and otherwise what `outrider.connect` and `Client.generate`
    raise. An error in `on_token` cancels the generation.
    """
    withheld = _withheld()
    if withheld.get("assistant_model") is not None:
        raise UsageError("assistant_model: the model drafts itself", "leave it out")
    if verifier is None:
        raise UsageError("verifier: no address is given", 'name one: model.generate(…, verifier="host:port")')
    streamer = streamer if streamer is not None else withheld.get("streamer")
    of_connection, of_call = split_settings(settings or {})
    request = read_request(
        input_ids, generation_config, logits_processor, stopping_criteria, stop_strings, model_kwargs
    )
    connection = connection_of(model, verifier, tokenizer_dir, of_connection)
    sampling = request.settings(connection.tokenizer, connection.model)
    sampling["seed"] = _seed(seed, generation_config.do_sample)
    with open_stream(connection, request.prompt_ids, {**of_call, **sampling}) as stream:
        _hand_out(stream, on_token, streamer)
        ids = stream.result().ids
    sequences = torch.cat([input_ids, input_ids.new_tensor([ids])], dim=1)
    return GenerateDecoderOnlyOutput(sequences) if generation_config.return_dict_in_generate else sequences


def _hand_out(stream: Stream, on_token: Callable[[TokenEvent], object] | None, streamer: Any) -> None:
    for event in stream:
        if not isinstance(event, TokenEvent):
            continue
        if on_token is not None:
            on_token(event)
        if streamer is not None:
            streamer.put(torch.tensor([event.token_id]))
    if streamer is not None:
        streamer.end()


def _seed(seed: int | None, is_sampled: bool) -> int:
    """A greedy text draws nothing, as in transformers."""
    if seed is not None or not is_sampled:
        return seed or 0
    return int(torch.randint(2**53, ()))


def _withheld() -> dict[str, Any]:
    """Returns arguments that `model.generate` of transformers 5 was given and hands to no callable: without them a
    streamer would get the prompt alone, and an assistant would be ignored, unsaid."""
    caller = sys._getframe(2)
    if caller.f_globals.get("__name__") != "transformers.generation.utils":
        return {}
    return {name: caller.f_locals.get(name) for name in ("assistant_model", "streamer")}
