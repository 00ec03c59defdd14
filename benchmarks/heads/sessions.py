"""`heads.sessions`: many co-located sessions at once by each kind of head, on the device that `--device auto` takes.

On a GPU also over a target of a 7B model's shape. There target and heads have random weights: times say something,
acceptance nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from benchmarks.gpu_check.shape import SHAPE_7B, Shape, make_facts, make_model
from benchmarks.gpu_check.stage import Setting
from benchmarks.gpu_check.variants import DECODERS
from benchmarks.heads.embedded import head_directories, load_prompt_ids
from benchmarks.heads.service import CLOUD_ONLY, Case, Service
from benchmarks.results_file import Found
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.heads.loading import load_heads
from outrider.cloud_verifier.heads.medusa import MedusaRun
from outrider.cloud_verifier.heads.modules import MedusaHead
from outrider.cloud_verifier.heads.sequence import Head, HeadFacts
from outrider.common.types import SamplingParams
from outrider.experiments.shared.results import Measure
from outrider.models import EMBEDDED

SESSIONS = (1, 4, 16)
NUM_NEW = 64
NUM_TURNS = 2
NUM_MEDUSA_HEADS = 3
KV_TOKENS = 16 * 1024

Figures = dict[str, float]


def run() -> Found:
    """Returns the measures."""
    backend = load_target(EMBEDDED / "target", device="auto")
    services = {"embedded": Service(backend, load_heads(head_directories(), backend))}
    if backend.device != "cpu":
        services["7B shape"] = shape_service(Setting(is_rehearsal=False, limit_s=0.0), SHAPE_7B)
    where = torch.cuda.get_device_name(backend.device) if backend.device != "cpu" else "a CPU"
    measures, details = [], {}
    for name, service in services.items():
        found = dict(compare(service))
        details[name] = {f"{count} sessions, {source}": each for (count, source), each in found.items()}
        measures += [_measure(name, where, source, found) for source in service.drafter.sources]
    return measures, details


def shape_service(setting: Setting, shape: Shape) -> Service:
    """Returns a service of a random target of that shape with random Medusa heads."""
    dtype = setting.dtype()
    backend = DECODERS["graphs"].make(
        make_model(setting, shape, dtype), make_facts(setting, shape, dtype), KV_TOKENS
    )
    heads = nn.ModuleList(MedusaHead(shape.hidden_size) for _ in range(NUM_MEDUSA_HEADS))
    heads.to(backend.device, dtype).requires_grad_(False)
    facts = HeadFacts("medusa", NUM_MEDUSA_HEADS, (shape.num_layers,), reads_all=False, fingerprint="random")
    return Service(backend, [Head(backend, facts, heads, MedusaRun)])


def compare(
    service: Service, sessions: Sequence[int] = SESSIONS, num_new: int = NUM_NEW, num_turns: int = NUM_TURNS
) -> Iterator[tuple[tuple[int, str], Figures]]:
    """Yields by number of sessions and source tokens a second of all, ms a step, and tokens a step of a session.
    Sources take turns; a turn before the first warms up."""
    prompts = load_prompt_ids(max(sessions))
    limit = service.engine.backend.num_tokens
    prompts = [tuple(min(token, limit - 1) for token in prompt) for prompt in prompts]
    sources = (CLOUD_ONLY, *service.drafter.sources)
    for num_sessions in sessions:
        totals = {source: [0.0, 0, 0] for source in sources}  # seconds, tokens, steps
        for turn in range(num_turns + 1):
            for source in sources:
                cases = [
                    Case(prompt, SamplingParams(seed=seed), source)
                    for seed, prompt in enumerate(prompts[:num_sessions])
                ]
                texts = service.write(cases, num_new)
                if turn:
                    total = totals[source]
                    total[0] += service.seconds
                    total[1] += sum(len(text.token_ids) - 1 for text in texts)
                    total[2] += max(text.num_steps for text in texts)
        for source, (seconds, num_tokens, num_steps) in totals.items():
            found = {
                "tokens_s": round(num_tokens / seconds, 1),
                "step_ms": round(1e3 * seconds / num_steps, 2),
                "tokens_a_step": round(num_tokens / num_steps / num_sessions, 2),
            }
            yield (num_sessions, source), found


def _measure(name: str, where: str, source: str, found: Mapping[tuple[int, str], Figures]) -> Measure:
    most = max(SESSIONS)
    ours, alone = found[most, source], found[most, CLOUD_ONLY]
    what = f"{name} target on {where}, {most} co-located sessions: tokens/s by {source} ({ours['tokens_s']}; "
    what += f"{ours['step_ms']} ms a step) : cloud-only ({alone['tokens_s']}; {alone['step_ms']})"
    id = f"heads.sessions_{name.replace(' ', '_').lower()}_{source}"
    return Measure(id, what, round(ours["tokens_s"] / alone["tokens_s"], 3), "ratio")
