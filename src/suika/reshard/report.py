"""What one participant did in a move."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields


@dataclass
class MoveReport:
    """`allocated_bytes`: new buffers; `staging_bytes`: packed messages in flight, at most. Seconds of `hash` lie inside
    those of `transfer` and `verify`."""

    received_bytes: int = 0
    sent_bytes: int = 0
    local_copy_bytes: int = 0  # same device, but cut differently
    kept_bytes: int = 0  # rebound
    adopted_bytes: int = 0  # of those received: came with a buffer that was taken over as it is, no byte copied
    hashed_bytes: int = 0
    allocated_bytes: int = 0
    staging_bytes: int = 0
    phase_s: dict[str, float] = field(default_factory=lambda: {"hash": 0.0})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Seconds add up over the visits."""
        start = time.perf_counter()
        yield
        self.phase_s[name] = self.phase_s.get(name, 0.0) + time.perf_counter() - start

    @staticmethod
    def total(reports: Iterable[MoveReport]) -> MoveReport:
        """Of several moves in a row: sums, but of what is in flight the most."""
        whole = MoveReport()
        for report in reports:
            for field_ in fields(report):
                if field_.name == "phase_s":
                    for name, seconds in report.phase_s.items():
                        whole.phase_s[name] = whole.phase_s.get(name, 0.0) + seconds
                else:
                    one, other = getattr(whole, field_.name), getattr(report, field_.name)
                    setattr(whole, field_.name, max(one, other) if field_.name == "staging_bytes" else one + other)
        return whole

    @contextmanager
    def hashing(self, num_bytes: int) -> Iterator[None]:
        self.hashed_bytes += num_bytes
        with self.phase("hash"):
            yield
