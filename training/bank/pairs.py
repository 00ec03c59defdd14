"""Lists the bank's targets and their drafts, and where each is.

Budgets are tokens, not minutes, so that a seed decides the weights whatever a machine's speed; on another processor
they differ by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.common.errors import UsageError
from outrider.models import EMBEDDED
from outrider.training.common.model import ModelConfig

RUN = Path("training/runs/bank")
PROMPT_LOOKUP = "prompt-lookup"


@dataclass(frozen=True, slots=True)
class BankDraft:
    """Describes a draft: `tokens` of distillation at `size` (0: untrained), the target's `first_layers`, or
    neither: copies of earlier text, or the draft that is committed beside the target."""

    name: str
    size: str = ""
    tokens: int = 0
    first_layers: int = 0

    @property
    def strategy(self) -> str:
        """Returns what `--draft-strategy` takes."""
        return PROMPT_LOOKUP if self.name == PROMPT_LOOKUP else "model"


@dataclass(frozen=True, slots=True)
class BankTarget:
    """Describes a target and its drafts. Without a `model` it is the embedded one."""

    name: str
    texts: str  # a key of `outrider.training.bank.texts.KINDS`
    drafts: tuple[BankDraft, ...]
    model: ModelConfig | None = None
    tokens: int = 0


PROSE = ModelConfig(
    256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=704,
    tied=True,
    vocab_size=4096,
    context=2048,
    family="qwen3",
)
TABLES = ModelConfig(
    192,
    num_layers=8,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=512,
    tied=False,
    vocab_size=2048,
    context=2048,
)
_LOOKUP = BankDraft(PROMPT_LOOKUP)

BANK = (
    BankTarget(
        "embedded",
        "code",
        (
            BankDraft("trained"),
            BankDraft("short", size="192x2", tokens=120_000),
            BankDraft("first-layers", first_layers=2),
            _LOOKUP,
            BankDraft("random", size="192x2"),
        ),
    ),
    BankTarget(
        "prose",
        "prose",
        (
            BankDraft("trained", size="96x2", tokens=40_000),
            BankDraft("first-layers", first_layers=1),
            _LOOKUP,
        ),
        PROSE,
        tokens=120_000,
    ),
    BankTarget(
        "tables",
        "tables",
        (
            BankDraft("trained", size="64x1", tokens=40_000),
            BankDraft("first-layers", first_layers=2),
            _LOOKUP,
        ),
        TABLES,
        tokens=120_000,
    ),
)


@dataclass(frozen=True, slots=True)
class BankFolder:
    """Says where the parts of one target of the bank are."""

    root: Path
    target: BankTarget

    @property
    def work(self) -> Path:
        """Returns the target's folder in the bank."""
        return self.root / self.target.name

    @property
    def prompts(self) -> Path:
        """Returns the file of prompts that no training has seen."""
        return self.work / "prompts.jsonl"

    @property
    def target_dir(self) -> Path:
        """Returns what `cloud-verifier serve --target` takes."""
        return EMBEDDED / "target" if self.target.model is None else self.work / "target"

    def draft_dir(self, draft: BankDraft) -> Path:
        """Returns what `edge-client run --draft` takes."""
        if draft.strategy == PROMPT_LOOKUP:
            return self.target_dir
        is_committed = not draft.size and not draft.first_layers
        return EMBEDDED / "draft" if is_committed else self.work / "drafts" / draft.name


def chosen(names: str | None, bank: tuple[BankTarget, ...] = BANK) -> tuple[BankTarget, ...]:
    """Returns the targets named, comma-separated; all where None. Raises `UsageError` naming `--only`."""
    if names is None:
        return bank
    found = {target.name: target for target in bank}
    for name in names.split(","):
        if name not in found:
            raise UsageError(f"--only {name}: choose from {', '.join(found)}")
    return tuple(found[name] for name in names.split(","))
