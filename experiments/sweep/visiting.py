"""One visit: one cell in one repeat, over a link of its own, by as many edges as it has sessions."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from outrider.common.clock import SYSTEM_CLOCK
from outrider.common.errors import LinkError, UsageError
from outrider.experiments.links.base import OpenLink
from outrider.experiments.shared.prompts import Prompt
from outrider.experiments.sweep.config.cells import Cell
from outrider.experiments.sweep.config.schema import SweepConfig
from outrider.experiments.sweep.edges import EdgePool, EdgeProcess
from outrider.experiments.sweep.linking import open_link
from outrider.experiments.sweep.machine import EnergyMeter, peak_rss_bytes, reset_peak_rss
from outrider.experiments.sweep.observing import Errand
from outrider.experiments.sweep.results.records import RequestRow, RoundRow, VisitRow, from_json
from outrider.experiments.sweep.verifiers import VerifierPool

_WARM_UP_TOKENS = 8

OnRequest = Callable[[RequestRow, list[RoundRow]], None]


@dataclass(frozen=True, slots=True)
class Request:
    """Says what one edge is to do next; `id` as in `RequestRow.request`."""

    id: str
    session: int
    prompt: Prompt


@dataclass(slots=True)
class Visitor:
    """Runs visits, and remembers what is warm."""

    config: SweepConfig
    prompts: Sequence[Prompt]
    edges: EdgePool
    verifiers: VerifierPool
    warm: set[tuple[int, str]] = dataclasses.field(default_factory=set)

    def read_prompts(self, cells: Sequence[Cell]) -> None:
        """Lets every verifier read every prompt once before anything counts: afterwards its prefix cache
        serves all cells alike, where the first visits would have paid for those that follow."""
        by_verifier = {self.verifiers.address_for(cell): cell for cell in cells if cell.has_link}
        [edge] = self.edges.take(1)
        for address, cell in by_verifier.items():
            for prompt in self.prompts:
                self._ask_briefly(edge, cell, Request("", 0, prompt), address, 2)

    def visit(self, cell: Cell, repeat: int, todo: Sequence[Request], on_request: OnRequest) -> VisitRow:
        """Runs the requests of one cell in one repeat; returns its row."""
        upstream = self.verifiers.address_for(cell) if cell.has_link else ""
        edges = self.edges.take(cell.num_sessions)
        self._warm_up(cell, edges, upstream)
        pid = self.verifiers.pid_for(cell) if cell.has_link else None
        for edge in edges:
            edge.ask({"op": "reset_peak"})
        is_reset = pid is not None and reset_peak_rss(pid)
        meter, started_s = EnergyMeter(), time.time()
        with open_link(self.config.realisation, cell, upstream) as link:
            opened_s = SYSTEM_CLOCK.now()
            meter.start()
            rows, wall_s = self._run(cell, repeat, todo, edges, link, opened_s, on_request)
            energy_j, wire = meter.stop(), link.wire_bytes() if link is not None else None
            facts = link.facts() if link is not None else {}
        peaks = [edge.ask({"op": "peak"})["peak_rss_bytes"] for edge in edges]
        return VisitRow(
            cell=cell.id,
            repeat=repeat,
            wall_s=round(wall_s, 4),
            num_requests=len(rows),
            num_tokens=sum(row.num_tokens for row in rows),
            wire_bytes_up=wire[0] if wire else None,
            wire_bytes_down=wire[1] if wire else None,
            edge_peak_rss_bytes=max((peak for peak in peaks if peak is not None), default=None),
            verifier_peak_rss_bytes=peak_rss_bytes(pid) if pid is not None and is_reset else None,
            verifier_memory=self.verifiers.memory_for(cell) if cell.has_link else {},
            energy_j=energy_j,
            link_facts=facts,
            started_s=round(started_s, 3),
        )

    def _run(
        self,
        cell: Cell,
        repeat: int,
        todo: Sequence[Request],
        edges: Sequence[EdgeProcess],
        link: OpenLink | None,
        opened_s: float,
        on_request: OnRequest,
    ) -> tuple[list[RequestRow], float]:
        """Each edge its requests, one after the other. Where the link has outages, they begin anew with each
        request: all edges start one together. Returns the rows, and the seconds that requests took."""
        rows: list[RequestRow] = []
        wall_s = 0.0

        def errands_of(edge: EdgeProcess, requests: Sequence[Request], since_s: float) -> None:
            for request in requests:
                job = self._job(cell, repeat, request, link.address if link is not None else "", since_s)
                answer = edge.ask(job)
                row = from_json(RequestRow, answer["request"])
                rows.append(row)
                on_request(row, [from_json(RoundRow, each) for each in answer["rounds"]])

        for wave in _waves(todo, len(edges), has_outages=bool(cell.link.outages)):
            if cell.link.outages and link is not None:
                link.restart_outages()
                opened_s = SYSTEM_CLOCK.now()
            start_s = time.monotonic()
            with ThreadPoolExecutor(len(edges)) as threads, _killing_on_error(edges):
                pairs = zip(edges, wave, strict=True)
                under_way = [threads.submit(errands_of, *pair, opened_s) for pair in pairs]
                for future in under_way:
                    future.result()
            wall_s += time.monotonic() - start_s
        return rows, wall_s

    def _job(
        self, cell: Cell, repeat: int, request: Request, address: str, opened_s: float
    ) -> dict[str, Any]:
        errand = Errand(
            cell=cell.id,
            request=request.id,
            repeat=repeat,
            session=request.session,
            prompt=request.prompt.id,
            seed=self.config.seed + repeat,
            link_opened_s=opened_s,
        )
        return {
            "op": "run",
            "settings": self.settings(cell, address),
            "errand": dataclasses.asdict(errand),
            "text": request.prompt.text,
            "synthetic": (self.config.synthetic or {}) if self.config.is_synthetic else None,
        }

    def settings(self, cell: Cell, address: str) -> dict[str, Any]:
        """Returns the settings of `edge-client run`, for an edge that dials `address`."""
        settings = cell.run_settings(self.config) | self.verifiers.edge_settings(cell)
        return settings | ({"verifier": address} if address else {})

    def _warm_up(self, cell: Cell, edges: Sequence[EdgeProcess], upstream: str) -> None:
        """Loads weights and writes a few tokens, without the link, before the first visit counts."""
        for index, edge in enumerate(edges):
            if (index, cell.id) in self.warm:
                continue
            self._ask_briefly(edge, cell, Request("", index, self.prompts[0]), upstream, _WARM_UP_TOKENS)
            self.warm.add((index, cell.id))

    def _ask_briefly(
        self, edge: EdgeProcess, cell: Cell, request: Request, address: str, num_tokens: int
    ) -> None:
        """Runs a request that does not count. Raises where it fails, naming the cell: so would all that
        follow."""
        job = self._job(cell, 0, request, address, 0.0)
        try:
            answer = edge.ask(job | {"settings": job["settings"] | {"max_new_tokens": num_tokens}})
        except UsageError as error:
            raise UsageError(f"cell {cell.id!r}: {error}") from error
        if trouble := answer["request"]["error"]:
            raise LinkError(f"cell {cell.id!r}: {trouble}")


@contextlib.contextmanager
def _killing_on_error(edges: Sequence[EdgeProcess]) -> Iterator[None]:
    """Ends the edges once one failed, or after Ctrl-C: nobody waits for the others' answers."""
    try:
        yield
    except BaseException:
        for edge in edges:
            edge.kill()
        raise


def _waves(todo: Sequence[Request], num_edges: int, has_outages: bool) -> Iterator[list[list[Request]]]:
    by_edge = [[request for request in todo if request.session == index] for index in range(num_edges)]
    if not has_outages:
        yield by_edge
        return
    for index in range(max(map(len, by_edge))):
        yield [requests[index : index + 1] for requests in by_edge]
