"""`model.generate(custom_generate=outrider.hf.generate)`: the target's text, drafted by the model in this process."""

from __future__ import annotations

import gc
import inspect
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.calls import eventually
from support.models import make_tiny_target
from support.processes.pairs import EMBEDDED
from support.processes.server import serving
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, LlamaModel

import outrider
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.edge_client.commands.cli import main
from outrider.hf import connections
from outrider.training.draft.restore import restore_draft

PROMPTS = ("class Reader:\n", "def add(first, second):\n    return", "import os\nimport ")
DRAFTING = {"mode": "speculative"}  # whatever this machine measures


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf") / "draft"
    restore_draft(EMBEDDED / "draft", directory)
    return directory


@pytest.fixture(scope="module")
def model(draft_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(draft_dir, dtype=torch.float32)


def ids_of(client: outrider.Client, text: str) -> torch.Tensor:
    return torch.tensor([client._connection.tokenizer.encode(text)])


def generate(model: Any, ids: torch.Tensor, address: str, **asked: Any) -> list[int]:
    """The new tokens; drafts are made whatever this machine measures."""
    given = {"max_new_tokens": 24, "settings": DRAFTING} | asked
    out = model.generate(ids, custom_generate=outrider.hf.generate, verifier=address, **given)
    assert out[:, : ids.shape[1]].equal(ids) and out.dtype == ids.dtype
    return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_edge_client_run(
    model: Any, client: outrider.Client, address: str, temperature: float, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    for prompt in PROMPTS:
        flags = ["--seed", "7", "--temperature", str(temperature), "--max-new-tokens", "24"]
        assert main(["run", prompt, "--verifier", address, *flags, "--json"]) == 0
        events: list[outrider.TokenEvent] = []
        ids = generate(model, ids_of(client, prompt), address, seed=7, on_token=events.append, **asked)
        assert ids == json.loads(capsys.readouterr().out)["token_ids"]
        assert [event.token_id for event in events] == ids
        assert "accepted" in {event.origin for event in events}, "the model drafts"


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),  # as transformers' own defaults are
        ({"do_sample": True, "top_k": 5, "temperature": 1.5}, {"temperature": 1.5, "top_k": 5}),
        ({"do_sample": True, "top_k": 0, "top_p": 0.7}, {"temperature": 1.0, "top_p": 0.7}),
        ({"do_sample": True, "top_k": 0, "min_p": 0.2}, {"temperature": 1.0, "min_p": 0.2}),
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"bad_words_ids": [[258], [343, 199]]}, {"bad_word": ["\n    ", '"""\n']}),
        ({"sequence_bias": {(258,): -30.0}}, {"logit_bias": {258: -30.0}}),
        ({"stop_strings": ["def"]}, {"stop": ["def"]}),
        ({"eos_token_id": [0, 199]}, {"stop_token_id": 199}),
        ({"eos_token_id": 199}, {"stop_token_id": 199, "ignore_eos": True}),
        ({"min_new_tokens": 6}, {"min_new_tokens": 6}),
        ({"max_new_tokens": None, "max_length": 15}, {"max_new_tokens": 10}),
        ({"max_new_tokens": None}, {"max_new_tokens": 20}),  # as transformers' own default is
    ],
)
def test_the_generation_config_is_the_daemons_settings(
    model: Any, client: outrider.Client, address: str, asked: dict[str, Any], settings: dict[str, Any]
) -> None:
    ids = ids_of(client, PROMPTS[0])
    assert ids.tolist() == [[493, 1343, 1444, 26, 199]]
    wanted = client.generate(ids[0].tolist(), seed=3, **({"temperature": 0.0} | settings))
    plain = client.generate(ids[0].tolist(), seed=3, temperature=settings.get("temperature", 0.0))
    assert generate(model, ids, address, seed=3, **asked) == list(wanted.ids)
    if settings.keys() - {"temperature", "min_new_tokens"}:
        assert wanted.ids != plain.ids, "the setting shows"


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_random_models_draft_the_greedy_text_of_transformers(arch: str, tmp_path: Path) -> None:
    """The target drafts for itself, and another model of its tokenizer drafts for it."""
    target_dir = make_tiny_target(tmp_path / "target", arch, seed=1)
    other = AutoModelForCausalLM.from_pretrained(make_tiny_target(tmp_path / "draft", arch, seed=2))
    target = AutoModelForCausalLM.from_pretrained(target_dir)
    ids = torch.tensor([[5, 9, 200, 17, 33, 8, 120]])
    wanted = target.generate(ids, max_new_tokens=20, do_sample=False)[0, 7:].tolist()
    origins = {}
    with serving(load_target(target_dir)) as server:
        for name, model in {"itself": target, "other": other}.items():
            events: list[outrider.TokenEvent] = []
            found = generate(
                model, ids, f"127.0.0.1:{server.port}", max_new_tokens=20, on_token=events.append
            )
            assert found == wanted
            origins[name] = [str(event.origin) for event in events]
        server.engine.check_integrity()
    assert "correction" not in origins["itself"]
    assert "correction" in origins["other"] or arch == "gemma2"  # whose random models repeat one token


def test_padding_on_the_left_is_no_part_of_the_prompt(
    model: Any, client: outrider.Client, address: str
) -> None:
    ids = ids_of(client, PROMPTS[1])
    padded = torch.cat([torch.full((1, 3), 1), ids], dim=1)
    mask = torch.ones_like(padded)
    mask[0, :3] = 0
    asked = {"repetition_penalty": 1.3, "max_new_tokens": 12}
    plain = generate(model, ids, address, attention_mask=torch.ones_like(ids), **asked)
    assert generate(model, padded, address, attention_mask=mask, **asked) == plain
    mask[0, 5] = 0
    with pytest.raises(outrider.UsageError, match="attention_mask: it hides tokens within"):
        generate(model, padded, address, attention_mask=mask)


def test_a_text_follows_its_seed_or_torchs(model: Any, client: outrider.Client, address: str) -> None:
    ids = ids_of(client, PROMPTS[0])

    def sampled(seed: int | None = None) -> list[int]:
        return generate(model, ids, address, do_sample=True, seed=seed, max_new_tokens=12)

    torch.manual_seed(4)
    first, second = sampled(), sampled()
    torch.manual_seed(4)
    assert (sampled(), sampled()) == (first, second) and first != second
    assert sampled(5) == sampled(5) != first
    state = torch.get_rng_state()
    generate(model, ids, address, max_new_tokens=2)
    assert torch.get_rng_state().equal(state), "a greedy text draws nothing"


def test_a_model_output_is_returned_where_it_is_asked_for(
    model: Any, client: outrider.Client, address: str
) -> None:
    ids = ids_of(client, PROMPTS[0])
    out = model.generate(
        ids,
        custom_generate=outrider.hf.generate,
        verifier=address,
        max_new_tokens=3,
        return_dict_in_generate=True,
    )
    assert out.sequences.shape == (1, 8) and out.scores is None


# ---------------------------------------------------------------------------------------- streams


class Streamer:
    def __init__(self) -> None:
        self.put_ids: list[Any] = []
        self.has_ended = False

    def put(self, value: torch.Tensor) -> None:
        self.put_ids.append(value.tolist())

    def end(self) -> None:
        self.has_ended = True


def test_a_streamer_of_transformers_has_the_prompt_and_each_token(
    model: Any, client: outrider.Client, address: str
) -> None:
    ids, streamer = ids_of(client, PROMPTS[0]), Streamer()
    new = generate(model, ids, address, max_new_tokens=6, streamer=streamer)
    assert streamer.put_ids == [ids.tolist(), *([each] for each in new)] and streamer.has_ended


def test_an_error_in_on_token_ends_the_generation_at_the_verifier(
    model: Any, client: outrider.Client, address: str, verifier: VerifierServer
) -> None:
    def stop(event: outrider.TokenEvent) -> None:
        if event.index == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        generate(model, ids_of(client, PROMPTS[0]), address, max_new_tokens=3000, on_token=stop)
    assert eventually(lambda: verifier.engine.num_sessions == 0)


# ------------------------------------------------------------------------------ model and connection


def test_the_model_stays_as_it_is_and_may_be_used_meanwhile(
    model: Any, client: outrider.Client, address: str
) -> None:
    ids = ids_of(client, PROMPTS[0])
    before, attention = model(ids).logits, model.config._attn_implementation
    model.train()
    seen = []
    generate(model, ids, address, max_new_tokens=3, on_token=lambda _: seen.append(model(ids).logits))
    assert model.training and model.config._attn_implementation == attention
    model.eval()
    assert len(seen) == 3 and all(each.equal(before) for each in seen)


def test_a_connection_is_kept_for_later_calls_and_goes_with_the_model(
    draft_dir: Path, client: outrider.Client, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(draft_dir, dtype=torch.float32)
    ids = ids_of(client, PROMPTS[0])
    generate(model, ids, address, max_new_tokens=4)
    (first,) = connections._of_models[model].connections.values()
    draft = first._shared.edge.draft
    assert draft is not None
    shared = {each.data_ptr() for each in draft.network.model.parameters()}  # type: ignore[attr-defined]
    assert shared == {each.data_ptr() for each in model.parameters()}
    generate(model, ids, address, max_new_tokens=4, settings={**DRAFTING, "num_speculative_tokens": 2})
    (again,) = connections._of_models[model].connections.values()
    assert again is first, "what a call may choose needs no other connection"
    first.check_integrity()
    monkeypatch.setattr(connections, "_MAX_KEPT", 1)
    generate(model, ids, address.replace("127.0.0.1", "localhost"), max_new_tokens=2)
    assert first not in connections._of_models[model].connections.values()
    gone = [weakref.ref(each) for each in (model, first, draft)]
    del model, first, again, draft
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_another_tokenizer_than_the_targets_is_refused(tmp_path: Path, address: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_target(tmp_path))
    with pytest.raises(outrider.IncompatibleError, match="the draft's tokenizer is not the target's"):
        generate(model, torch.tensor([[1, 2]]), address)


# ---------------------------------------------------------------------------------------- refusals


class Foreign:
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return scores


def refusals() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"num_beams": 2}, "num_beams=2: the target samples its text"
    yield {"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"
    yield {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"
    yield {"max_time": 3.0}, "max_time=3.0"
    yield {"output_scores": True, "return_dict_in_generate": True}, "output_scores"
    yield {"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"
    yield {"do_sample": True, "typical_p": 0.3}, "typical_p"
    yield {"suppress_tokens": [3]}, "suppress_tokens"
    yield {"sequence_bias": {(3, 4): 1.0}}, "sequence_bias: .* has 2 tokens"
    yield {"bad_words_ids": [[10**6]]}, "bad_words_ids: .*no such tokens"
    yield {"min_new_tokens": 3, "eos_token_id": 199}, "min_new_tokens with eos_token_id"
    yield {"logits_processor": [Foreign()]}, "logits_processor: Foreign"
    yield {"stopping_criteria": [Foreign()]}, "stopping_criteria: Foreign"
    yield {"do_sample": True, "top_p": 0.0}, "top_p"
    yield {"inputs_embeds": torch.zeros(1, 2, 256)}, "inputs_embeds|batch"
    is_renamed = "cache" in inspect.signature(LlamaModel.forward).parameters  # by transformers 5.24
    yield (
        {"cache" if is_renamed else "past_key_values": DynamicCache()},
        "(cache|past_key_values): the verifier",
    )
    yield {"position_ids": torch.tensor([[3, 4]])}, "position_ids"
    yield {"attention_mask": torch.tensor([[0, 1, 1]])}, r"attention_mask: has shape \[1, 3\]"
    yield {"settings": {"temperature": 0.5}}, "temperature is the generation config's"
    yield {"settings": {"draft_threads": 2}}, "draft_threads has no effect"
    yield {"settings": {"mode": "edge-only"}}, "mode edge-only"
    yield {"settings": {"tempo": 2}}, "unknown setting tempo"
    yield {"verifier": None}, "verifier: no address"
    yield {"tokenizer_dir": "/nowhere"}, "tokenizer_dir: no tokenizer.json in /nowhere"


@pytest.mark.parametrize(("asked", "words"), [pytest.param(*each, id=each[1][:30]) for each in refusals()])
def test_what_cannot_be_done_is_refused_by_name(
    model: Any, address: str, asked: dict[str, Any], words: str
) -> None:
    call = {"verifier": address, "custom_generate": outrider.hf.generate, "max_new_tokens": 4} | asked
    with pytest.raises(outrider.UsageError, match=words):
        model.generate(torch.tensor([[5, 6]]), **call)


def test_batches_and_assistants_are_refused_by_name(model: Any, address: str) -> None:
    with pytest.raises(outrider.UsageError, match="input_ids: a batch of 2 texts"):
        generate(model, torch.tensor([[5, 6], [7, 8]]), address)
    with pytest.raises(outrider.UsageError, match="assistant_model"):
        generate(model, torch.tensor([[5, 6]]), address, assistant_model=model)


def test_every_field_of_a_generation_config_is_accounted_for() -> None:
    """A field that a later transformers adds is looked at before it is ignored."""
    from outrider.hf.processors import _FIELDS
    from outrider.hf.request import REFUSED

    known = {*REFUSED, *_FIELDS.values(), *HONOURED, *WITHOUT_EFFECT}
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} - known == set()


HONOURED = (
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "stop_strings",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "bad_words_ids",
    "sequence_bias",
    "renormalize_logits",
    "eos_token_id",
    "return_dict_in_generate",
)
WITHOUT_EFFECT = (
    # How transformers would compute: nothing is computed there.
    "use_cache",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "compile_config",
    "disable_compile",
    "continuous_batching_config",
    "low_memory",
    "prefill_chunk_size",
    # Of beams, batches, encoders and assistants, which are refused.
    "early_stopping",
    "length_penalty",
    "pad_token_id",
    "bos_token_id",
    "decoder_start_token_id",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "max_matching_ngram_size",
    "assistant_lookbehind",
    "target_lookbehind",
    "assistant_ensemble_weight",
    "speculation_type",
    "transformers_version",
)
