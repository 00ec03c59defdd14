"""What several generations at once share: one draft, and the KV of texts that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.common.types import Method, SamplingParams
from outrider.edge_client.config.methods import check_draft_paths
from outrider.edge_client.config.run_config import RunConfig, draft_dir
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.drafting.base import DraftModel, ServesOwners
from outrider.edge_client.drafting.pool import DraftLease, create_pool, with_lease
from outrider.edge_client.drafting.registry import has_draft_files
from outrider.edge_client.session.factory import Edge, OpenDraft, Surroundings, create_edge, draw_seed
from outrider.edge_client.session.session import EdgeSession
from outrider.edge_client.session.usage import make_usage


@dataclass(frozen=True, slots=True)
class Prepared:
    """Holds a session that is ready to start, and facts for its answer."""

    session: EdgeSession
    config: RunConfig
    seed: int
    prompt_ids: Sequence[int]
    lease: DraftLease | None

    @property
    def num_prompt_tokens(self) -> int:
        """Returns how many tokens the prompt has."""
        return len(self.prompt_ids)

    @property
    def num_reused_tokens(self) -> int:
        """Returns how many tokens of the prompt the draft's KV cache holds already."""
        return self.lease.num_reused_tokens if self.lease else 0

    @property
    def num_read_tokens(self) -> int:
        """Returns how many tokens of the prompt the draft has read: none where nothing was drafted."""
        return self.num_prompt_tokens - self.num_reused_tokens if self.session.has_draft_read else 0

    @property
    def usage(self) -> dict[str, object]:
        """Returns the counts and times of the text so far (`make_usage`)."""
        return make_usage(
            self.session.result, self.config, self.num_prompt_tokens, self.seed, self.num_reused_tokens
        )


class SharedEdge:
    """Prepares sessions, which may run at the same time. Thread-safe."""

    def __init__(self, edge: Edge, max_cache_bytes: int) -> None:
        self.edge = edge
        self._pool = create_pool(edge.draft, max_cache_bytes)

    @property
    def num_idle(self) -> int:
        """Returns how many sequences of ended texts are kept."""
        return self._pool.num_idle if self._pool else 0

    @property
    def num_idle_bytes(self) -> int:
        """Returns their KV in bytes."""
        return self._pool.num_idle_bytes if self._pool else 0

    def prepare(
        self,
        prompt: str | Sequence[int],
        config: RunConfig,
        depth: DepthPolicy | None = None,
        owner: str = "",
    ) -> Prepared:
        """Returns a session for a prompt, text or token ids; encoding a long one takes time. A draft that keeps texts
        keeps those of each `owner` apart. Raises what `Edge.session` raises, to which `depth` is given."""
        prompt_ids = self.edge.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        seed = draw_seed() if config.seed is None else config.seed
        lease = self._lease(config)
        session = self.edge.session(prompt_ids, seed, config, self._draft_of(owner, lease), depth)
        return Prepared(session, config, seed, prompt_ids, lease)

    def warm_up(self) -> None:
        """Drafts two tokens and prepares a session, so that the first request does not wait for imports."""
        if self.edge.draft is not None:
            sequence = self.edge.draft.sequence(SamplingParams())
            sequence.commit([0])
            sequence.propose(2)
            sequence.close()
        self.check(self.edge.config)

    def check(self, config: RunConfig) -> None:
        """Raises what `Edge.session` raises for a configuration that no text could be generated with."""
        self.prepare((0,), config)

    def close(self) -> None:
        """Frees the pool and the draft. No session may run."""
        if self._pool is not None:
            self._pool.close()
        self.edge.close()

    def check_integrity(self) -> None:
        """Asserts that the pool is consistent."""
        if self._pool is not None:
            self._pool.check_integrity()

    def _draft_of(self, owner: str, lease: DraftLease | None) -> DraftModel | None:
        draft = self.edge.draft
        if isinstance(draft, ServesOwners):
            draft = draft.of_owner(owner)
        return draft if lease is None else with_lease(draft, lease)

    def _lease(self, config: RunConfig) -> DraftLease | None:
        """Returns a draft sequence with the KV of an earlier text. None where drafts decide what is written,
        so that the text would depend on what was in the cache (see pool.py)."""
        is_drafted = config.mode.has_draft and config.mode is not ExecutionMode.EDGE_ONLY
        if self._pool is None or not is_drafted or config.verification.method is not Method.COUPLED:
            return None
        return self._pool.lease()


def create_shared_edge(
    config: RunConfig,
    has_draft: bool | None = None,
    open_draft: OpenDraft | None = None,
    surroundings: Surroundings | None = None,
) -> SharedEdge:
    """Loads the tokenizer and the draft, where there is one unless `has_draft` says otherwise: a request may choose
    another mode. Arguments and errors as of `create_edge`."""
    draft = config.draft
    if has_draft is None:
        is_there = has_draft_files(draft.strategy, draft_dir(config), draft.backend)
        has_draft = config.mode.has_draft or is_there
    check_draft_paths(config, has_draft)
    edge = create_edge(config, has_draft, open_draft, surroundings)
    return SharedEdge(edge, int(config.serve.draft_cache_mb * 2**20))
