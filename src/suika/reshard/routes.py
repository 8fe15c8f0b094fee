"""Who sends what to whom.

A needer that held a cell before keeps it. Otherwise a holder on its node sends; where the node has none, one copy comes
over the network, from any old owner (replicas and leavers too), and fans out inside the node. Among equals the sender
with the least-loaded link is chosen; large groups are split so that several links work on them at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from suika.reshard.links import Links

ALIGN_BYTES = 8  # splits fall on multiples of the widest element


class Flow(NamedTuple):
    """Bytes [start, stop) of a group's stream from one participant to another. Hop 1 forwards what hop 0 brought."""

    hop: int
    src: int
    dst: int
    group: int
    start: int
    stop: int


class Demand(NamedTuple):
    """A group in terms of participants: who has it, who must have it, how large it is, and whether it may come late."""

    holders: tuple[int, ...]
    needers: tuple[int, ...]
    num_bytes: int
    late: bool = False


@dataclass
class LinkLoad:
    """Seconds of traffic per participant, inside nodes and between them, out and in."""

    num_participants: int
    out_s: dict[bool, list[float]] = field(init=False)
    in_s: dict[bool, list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.out_s = {network: [0.0] * self.num_participants for network in (False, True)}
        self.in_s = {network: [0.0] * self.num_participants for network in (False, True)}

    @property
    def worst_s(self) -> float:
        return max(
            (max(loads, default=0.0) for side in (self.out_s, self.in_s) for loads in side.values()), default=0.0
        )


def route(demands: Sequence[Demand], links: Links, split_bytes: int) -> tuple[list[Flow], LinkLoad]:
    """Flows that satisfy every demand, and the load they put on each link.

    What may not come late is routed first, so that its own load is even; then demands without a choice go first, large
    before small. Every tie is broken by index, so that all participants derive the same flows.
    """
    load = LinkLoad(len(links.devices))
    router = _Router(links, load, split_bytes)
    order = sorted(
        range(len(demands)), key=lambda g: (demands[g].late, len(demands[g].holders), -demands[g].num_bytes, g)
    )
    for group in order:
        router.serve(group, demands[group])
    return router.flows, load


def check_flows(demands: Sequence[Demand], flows: Sequence[Flow]) -> None:
    """Raise `AssertionError` unless each needer gets each byte it lacks once, from somebody who has it by then."""
    arrived: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # (participant, group), in hop 0
    covered: dict[tuple[int, int], int] = defaultdict(int)
    for hop, src, dst, group, start, stop in sorted(flows, key=lambda flow: (flow.group, flow.dst, flow.start)):
        assert start == covered[dst, group], f"{dst} gets byte {start} of group {group} twice or out of order"
        covered[dst, group] = stop
        if hop == 0:
            assert src in demands[group].holders, f"{src} sends group {group} without having it"
            arrived[dst, group].append((start, stop))
    for hop, src, _, group, start, stop in flows:
        forwarded = hop == 0 or any(a <= start and stop <= b for a, b in arrived[src, group])
        assert forwarded, f"{src} forwards bytes {start}:{stop} of group {group} that it does not receive"
    for group, demand in enumerate(demands):
        for needer in set(demand.needers).difference(demand.holders):
            assert covered.pop((needer, group), 0) == demand.num_bytes, f"{needer} does not get all of group {group}"
    assert not covered, f"bytes for nobody: {covered}"


class _Router:
    def __init__(self, links: Links, load: LinkLoad, split_bytes: int) -> None:
        self.links, self.load, self.split_bytes = links, load, split_bytes
        self.flows: list[Flow] = []

    def serve(self, group: int, demand: Demand) -> None:
        holding = set(demand.holders)
        waiting: dict[int, list[int]] = defaultdict(list)  # node -> needers there that lack it
        for needer in demand.needers:
            if needer not in holding:
                waiting[self.links.node[needer]].append(needer)
        for node, needers in waiting.items():
            near = [holder for holder in demand.holders if self.links.node[holder] == node]
            if near:
                for needer in needers:
                    for start, stop in self._parts(demand.num_bytes, -(-len(near) // len(needers))):
                        self._send(0, self._least_loaded(near, False), needer, group, start, stop)
            else:
                senders = -(-len(demand.holders) // len(waiting))  # a fair share of them for each node
                self._bring(group, demand, needers, max(senders, len(needers)))

    def _bring(self, group: int, demand: Demand, needers: list[int], most_parts: int) -> None:
        """One copy over the network, taken in by several devices of the node when it is large, then fanned out."""
        for start, stop in self._parts(demand.num_bytes, most_parts):
            entry = min(needers, key=self.load.in_s[True].__getitem__)
            self._send(0, self._least_loaded(demand.holders, True), entry, group, start, stop)
            for other in needers:
                if other != entry:
                    self._send(1, entry, other, group, start, stop)

    def _least_loaded(self, holders: Sequence[int], network: bool) -> int:
        return min(holders, key=self.load.out_s[network].__getitem__) if len(holders) > 1 else holders[0]

    def _parts(self, num_bytes: int, most: int) -> list[tuple[int, int]]:
        """[0, num_bytes) in at most `most` even parts of at least `split_bytes`."""
        num = max(1, min(most, num_bytes // self.split_bytes))
        if num == 1:
            return [(0, num_bytes)]
        each = -(-num_bytes // num)
        each += -each % ALIGN_BYTES
        return [(start, min(start + each, num_bytes)) for start in range(0, num_bytes, each)]

    def _send(self, hop: int, src: int, dst: int, group: int, start: int, stop: int) -> None:
        network = self.links.node[src] != self.links.node[dst]
        seconds = (stop - start) / self.links.speed(src, dst)
        self.load.out_s[network][src] += seconds
        self.load.in_s[network][dst] += seconds
        self.flows.append(Flow(hop, src, dst, group, start, stop))
