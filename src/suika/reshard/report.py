"""What one participant did in a move."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


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

    @contextmanager
    def hashing(self, num_bytes: int) -> Iterator[None]:
        self.hashed_bytes += num_bytes
        with self.phase("hash"):
            yield
