"""Arena-like (arXiv 2403.16125): place a newcomer by searching over halvings of what others hold.

When a job waits, running jobs may be scaled to half their devices; the search goes `depth` halvings deep and takes the
combination with the greatest total throughput, each job's relative to its rate as asked for. When devices are free,
running jobs are doubled by the same measure. Adapted: device types are one here, so the search over them falls away; a
job starts at the size asked for, or at halves of that; jobs are served by age and are not preempted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.policies.order import Fact, by, facts, give, grow, open_devices


@dataclass(frozen=True)
class Policy:
    """`width`: running jobs with the least loss that are tried per newcomer.
    `shortest`: by run time (found much better here), not age."""

    name: str = "arena"
    round_s: float = 0.0
    depth: int = 2
    width: int = 8
    shortest: int = 1
    repay: float = 2.0

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        known, free = facts(board), open_devices(board)
        running = [fact for fact in known if fact.held]
        sizes = {fact.number: fact.held for fact in running}
        free -= sum(sizes.values())
        started: list[Fact] = []
        for fact in by((f for f in known if not f.held), lambda f: f.time_s(f.asked) if self.shortest else 0.0):
            found = self._admit(fact, running, sizes, free)
            if found is None:
                continue
            free, size, halved = found
            sizes.update(halved)
            sizes[fact.number] = size
            started.append(fact)

        def gain(fact: Fact, old: int, new: int) -> float:
            if new < 2 * old or (old == fact.held and fact.time_s(old) - fact.time_s(new) <= self.repay * fact.pause_s):
                return 0.0
            return _relative(fact, new) - _relative(fact, old)

        grow(known, sizes, free, gain, most=2)
        return give(board, running + started, sizes)

    def _admit(
        self, fact: Fact, running: list[Fact], sizes: dict[int, int], free: int
    ) -> tuple[int, int, dict[int, int]] | None:
        """(devices left, the newcomer's size, halved sizes) with the greatest total throughput; None if none fits."""
        halvable = [f for f in running if _half(f, sizes[f.number])]
        halvable.sort(key=lambda f: (_relative(f, sizes[f.number]) - _relative(f, _half(f, sizes[f.number])), f.number))
        best: tuple[float, int, int, dict[int, int]] | None = None
        for num in range(self.depth + 1):
            for group in combinations_with_replacement(halvable[: self.width], num):
                halved: dict[int, int] = {}
                for other in group:
                    halved[other.number] = _half(other, halved.get(other.number, sizes[other.number]))
                if any(size == 0 for size in halved.values()):
                    continue
                room = free + sum(sizes[n] - size for n, size in halved.items())
                lost = sum(
                    _relative(other, sizes[other.number]) - _relative(other, halved[other.number])
                    for other in {f.number: f for f in group}.values()
                )
                size = fact.asked
                while size > room:
                    size = _half(fact, size)
                    if not size:
                        break
                if size and (best is None or _relative(fact, size) - lost > best[0]):
                    best = _relative(fact, size) - lost, room - size, size, halved
        return None if best is None or best[0] <= 0 else best[1:]


def _half(fact: Fact, size: int) -> int:
    """The largest feasible size of at most half of `size`, 0 if there is none."""
    return max((n for n in fact.menu.nums if n <= size // 2), default=0)


def _relative(fact: Fact, size: int) -> float:
    return fact.menu.rate(fact.menu.size_for(size)) / fact.menu.rate(fact.asked)
