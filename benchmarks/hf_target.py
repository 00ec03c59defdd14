"""The embedded target in transformers, to be compared with: float32, its own cache, as many threads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.sessions import tpot_s
from outrider.common.process.quiet_loading import quiet_loading
from outrider.edge_client.core.options import ExecutionMode
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.prompts import Prompt
from outrider.models import EMBEDDED

MAX_BATCH_S = 120.0
CLOUD_ONLY = Case(ExecutionMode.CLOUD_ONLY, 0.0)


class HfTarget:
    """Decodes greedily with transformers' own loops."""

    def __init__(self, num_threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as hf_logging

        torch.set_num_threads(num_threads)
        with quiet_loading(hf_logging):
            self.model = AutoModelForCausalLM.from_pretrained(
                EMBEDDED / "target", dtype=torch.float32, local_files_only=True
            ).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def generate_s(self, prompts: Sequence[Sequence[int]], num_new: int) -> float:
        """Returns the seconds of one static batch, left-padded, `num_new` tokens each."""
        import torch

        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        begin_s = time.perf_counter()
        self.model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=num_new, max_new_tokens=num_new
        )
        return time.perf_counter() - begin_s

    @contextlib.contextmanager
    def batching_continuously(self) -> Iterator[Callable[[Sequence[Sequence[int]], int], float]]:
        """Yields `run(prompts, num_new)` with continuous batching, which returns seconds.

        Switches the model's attention.
        """
        from transformers import ContinuousBatchingConfig, GenerationConfig

        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        pool = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=2048)
        with self.model.continuous_batching_context_manager(
            generation, timeout=10.0, continuous_batching_config=pool
        ) as manager:

            def run(prompts: Sequence[Sequence[int]], num_new: int) -> float:
                begin_s = time.perf_counter()
                manager.add_requests([list(prompt) for prompt in prompts], max_new_tokens=num_new)
                lengths: list[int] = []
                while len(lengths) < len(prompts) and time.perf_counter() < begin_s + MAX_BATCH_S:
                    if (result := manager.get_result(timeout=1.0)) is not None and result.is_finished():
                        lengths.append(len(result.generated_tokens))
                if lengths != [num_new] * len(prompts):
                    raise RuntimeError(f"continuous batching gave texts of {lengths} tokens")
                return time.perf_counter() - begin_s

            yield run


def compare_with_generate(
    decoder: Decoder, prompts: Sequence[Prompt], num_new: int, num_threads: int
) -> dict[str, list[float]]:
    """Returns seconds a token after the first one, greedy, prompt by prompt in turn.

    "ours" and "again" are cloud-only (the second for the A/A), "transformers" is `generate`.
    """
    target = HfTarget(num_threads)
    seconds: dict[str, list[float]] = {"ours": [], "transformers": [], "again": []}
    for number, prompt in enumerate(prompts):
        ids = [decoder.tokenizer.encode(prompt.text)]
        if number == 0:
            decoder.decode(prompt.text, CLOUD_ONLY, 8)
            target.generate_s(ids, 2)
        seconds["ours"].append(tpot_s(decoder.decode(prompt.text, CLOUD_ONLY, num_new)))
        whole_s, first_s = target.generate_s(ids, num_new), target.generate_s(ids, 1)
        seconds["transformers"].append((whole_s - first_s) / (num_new - 1))
        seconds["again"].append(tpot_s(decoder.decode(prompt.text, CLOUD_ONLY, num_new)))
        print(f"  prompt {number + 1} of {len(prompts)}", flush=True)
    return seconds
