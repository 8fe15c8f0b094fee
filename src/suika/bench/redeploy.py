"""`suika bench redeploy`: real moves of a training job on this machine's CPU devices, against checkpoint and restart.

The built-in trainer goes back and forth between two plans; each direction is a case. Definitions are those of
docs/design/redeploy.md; what a job cannot tell about itself (exactness of every element, memory, the bare links) is
measured by `bare.py` on the same move in processes of its own, right afterwards.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from suika.backends.local import LocalBackend
from suika.bench import bare
from suika.core.cluster import Cluster, Node
from suika.core.decision import Reason, ReasonCode
from suika.core.errors import require
from suika.core.job import JobSpec, parse_job
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.core.redeployment import Redeployment
from suika.reshard.assignment import assign
from suika.reshard.state import JobShape
from suika.runtime.baseline import ColdProcesses, Medium, measure_restart
from suika.runtime.coordinator import JobRun
from suika.runtime.events import Ended, JobEvent, Measured, StepDone
from suika.runtime.gang import Limits
from suika.runtime.timing import STEPS_FOR_A_MEDIAN
from suika.train.data import prepare

CLUSTER = Cluster((Node("a", 4, "cpu"), Node("b", 4, "cpu")))
REASON = Reason(ReasonCode.USER, "the benchmark wants it")
_WAIT_S = 300.0

# 12 bytes per parameter (fp32 weights, two moments): about 0.3 and 1.5 GB of state.
MODELS = {
    "0.3": {"family": "llama", "layers": 6, "hidden": 512, "ffn": 1408, "heads": 8, "vocab": 5000},
    "1.5": {"family": "llama", "layers": 8, "hidden": 1024, "ffn": 2816, "heads": 16, "vocab": 10000},
}


@dataclass(frozen=True)
class Pair:
    """Two ends of a move, there and back. Devices by number: 0-3 on node a, 4-7 on node b."""

    note: str
    one: tuple[str, str]
    other: tuple[str, str]


PAIRS = (
    Pair("tensor to pipeline", ("tp=2,pp=2,dp=1", "0123"), ("tp=1,pp=4,dp=1", "0123")),
    Pair("data to tensor", ("tp=1,pp=2,dp=2", "0123"), ("tp=2,pp=2,dp=1", "0123")),
    Pair("two devices more or less", ("tp=1,pp=2,dp=1", "01"), ("tp=1,pp=2,dp=2", "0123")),
    Pair("to another node", ("tp=1,pp=2,dp=1", "01"), ("tp=1,pp=2,dp=1", "45")),
    Pair("on two nodes", ("tp=2,pp=1,dp=2", "0145"), ("tp=2,pp=2,dp=1", "0145")),
)


def run(
    sizes: str = "0.3,1.5",
    repeats: int = 6,
    restarts: int = 1,
    cold: bool = True,
    pairs: str = "",
    weights_first: bool = False,
) -> dict[str, Any]:
    """Real moves on CPU devices: pause, bandwidth and memory, beside checkpoint and restart.

    `sizes`: state in GB (0.3, 1.5); `repeats`: moves per case, of which medians are taken; `restarts`: warm restarts
    per case and medium; with none of either only bare moves are measured. `pairs`: numbers of the transitions to run,
    by default all. `weights_first`: compute the next step while masters and moments stream.
    """
    numbers = _chosen("pairs", pairs, [str(number) for number in range(len(PAIRS))])
    chosen_sizes = _chosen("sizes", sizes, list(MODELS))
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="suika-bench-") as name:
        folder = Path(name)
        data = _text(folder)
        with LocalBackend(CLUSTER, folder / "run", preload=("suika.train.program", "suika.bench.bare")) as backend:
            for size in chosen_sizes:
                spec = _spec(size, data)
                for number in numbers:
                    bench = _Bench(spec, size, PAIRS[int(number)], backend, folder, repeats, weights_first)
                    cases += bench.cases(restarts, cold)
    return {"cases": cases}


class _Bench:
    """One pair of plans with one model."""

    def __init__(
        self,
        spec: JobSpec,
        size: str,
        pair: Pair,
        backend: LocalBackend,
        folder: Path,
        repeats: int,
        weights_first: bool,
    ) -> None:
        self.spec, self.size, self.pair, self.backend, self.folder = spec, size, pair, backend, folder
        self.repeats, self.weights_first = repeats, weights_first
        one = _plan(spec, pair.one[0], _devices(pair.one[1]))
        layout = Layout.parse(pair.other[0]).resolve(spec.model)
        there = assign(JobShape.of(spec), one, layout, _devices(pair.other[1]), CLUSTER)
        self.ends = (one, _plan(spec, pair.other[0], there))

    def cases(self, restarts: int, cold: bool) -> list[dict[str, Any]]:
        records = self._moves() if self.repeats else []
        found = []
        for old, new in (self.ends, self.ends[::-1]):
            name = f"{self.size} GB: {_short(old)} -> {_short(new)}, {self.pair.note}"
            mine = [record for record in records if record.new == new]
            probes = [self._bare(old, new, lap) for lap in range(3)]
            found.append(
                {
                    "case": name,
                    "weights_first": self.weights_first,
                    **_figures(mine, probes),
                    **self._restarts(old, new, restarts, cold),
                }
            )
            shown = ("pause_s", "pause_bound_s", "checkpoint_restart_warm_s")
            print(f"{name}: " + ", ".join(f"{key} {found[-1][key]}" for key in shown), file=sys.stderr)
        return found

    def _moves(self) -> list[Redeployment]:
        """The measured records of `repeats` moves in each direction."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            job = _Watched(self.spec, self.backend, Path(folder))
            try:
                job.run.start(self.ends[0], 1).result(_WAIT_S)
                job.settle()
                for generation in range(2, 2 + 2 * self.repeats):
                    target = self.ends[(generation + 1) % 2]
                    moving = job.run.redeploy(target, generation, REASON, weights_first=self.weights_first)
                    record = moving.result(_WAIT_S)
                    if record.error is not None:
                        raise RuntimeError(f"move {generation} was given up: {record.error}")
                    job.settle()
            finally:
                job.run.close()
        return job.records

    def _bare(self, old: Plan, new: Plan, lap: int) -> bare.BareMove:
        name = f"bare-{self.size}-{_short(old)}-{_short(new)}-{lap}".replace(",", "").replace("=", "")
        return bare.measure(self.spec, old, new, self.backend, CLUSTER, self.folder, name)

    def _restarts(self, old: Plan, new: Plan, num: int, cold: bool) -> dict[str, Any]:
        """The better of memory and disk, fork-warmed; and one from cold processes."""
        place = (self.spec, old, new, self.backend, CLUSTER, self.spec.data)
        media: tuple[Medium, ...] = ("memory", "disk")
        warm = [
            statistics.median(measure_restart(*place, medium, self.folder).pause_s for _ in range(num))
            for medium in media[: 2 if num else 0]
        ]
        fresh = None
        if cold:
            numbers = iter(range(1000))
            machines = ColdProcesses(
                lambda: LocalBackend(CLUSTER, self.folder / f"cold{next(numbers)}", preload=("suika.train.program",))
            )
            try:
                fresh = measure_restart(*place, "memory", self.folder, restart_on=machines).pause_s
            finally:
                machines.close()
        return {"checkpoint_restart_warm_s": min(warm) if warm else None, "checkpoint_restart_cold_s": fresh}


def _figures(records: Sequence[Redeployment], probes: Sequence[bare.BareMove]) -> dict[str, Any]:
    """Medians over the moves; `ci95` is their range (six values: it holds the median with 97 %)."""
    columns = {
        "pause_s": [record.pause_s for record in records if record.pause_s is not None],
        "prepare_lost_s": [record.prepare_lost_s for record in records],
        "total_s": [record.total_s for record in records if record.total_s is not None],
        "pause_bound_s": [probe.bare_s for probe in probes],
        "link_bytes_per_s": [probe.worst_bytes / probe.transfer_s if probe.transfer_s else 0.0 for probe in probes],
        "bare_link_bytes_per_s": [probe.worst_bytes / probe.bare_s if probe.bare_s else 0.0 for probe in probes],
    }
    first = probes[0]
    phases = records[0].phase_s if records else {}
    return {
        "mode": records[0].mode if records else "keep",
        **{name: statistics.median(values) if values else None for name, values in columns.items()},
        "moved_bytes": first.moved_bytes,
        "adopted_bytes": first.adopted_bytes,
        "network_bytes": records[0].network_bytes if records else None,
        "copied_resident_bytes": max(probe.kept_copied_bytes for probe in probes),
        "recut_bytes": first.recut_bytes,
        "peak_extra_bytes": max(probe.peak_extra_bytes for probe in probes),
        "state_bit_equal": all(probe.exact for probe in probes),
        "phase_s": {phase: statistics.median(record.phase_s[phase] for record in records) for phase in phases},
        "move_phase_s": {phase: statistics.median(probe.phase_s[phase] for probe in probes) for phase in first.phase_s},
        "ci95": {name: [min(values), max(values)] for name, values in columns.items() if values},
    }


class _Watched:
    """A job, its measured moves, and a way to wait until its step time is known."""

    def __init__(self, spec: JobSpec, backend: LocalBackend, folder: Path) -> None:
        self.records: list[Redeployment] = []
        self._news = threading.Condition()
        self._steps, self._ended = 0, False
        self.run = JobRun(
            f"bench-{folder.name}", spec, backend, CLUSTER, folder, spec.data, self._hear, limits=Limits(silent_s=60.0)
        )

    def _hear(self, event: JobEvent) -> None:
        with self._news:
            match event:
                case Measured():
                    self.records.append(event.record)
                case StepDone():
                    self._steps += 1
                case Ended():
                    self._ended = True
            self._news.notify_all()

    def settle(self) -> None:
        """Wait for enough steps of the present layout."""
        with self._news:
            self._steps = 0
            there = self._news.wait_for(lambda: self._ended or self._steps > STEPS_FOR_A_MEDIAN + 1, _WAIT_S)
        if not there or self._ended:
            raise RuntimeError("the job ended" if self._ended else "the job is too slow")


def _text(folder: Path) -> str:
    """Random bytes as training data."""
    source, out = folder / "text", folder / "text.bin"
    source.write_bytes(np.random.default_rng(0).integers(97, 123, 1 << 16, dtype=np.uint8).tobytes())
    prepare(source, out)
    return str(out)


def _chosen(field: str, text: str, known: list[str]) -> list[str]:
    """What `text` names, comma-separated; nothing: all that is known."""
    names = [name.strip() for name in text.split(",")] if text else known
    for name in names:
        require(name in known, field, name, "unknown", f"known: {', '.join(known)}")
    return names


def _spec(size: str, data: str) -> JobSpec:
    base = {"name": "bench", "model": MODELS[size], "data": data, "global_batch": 4, "sequence_length": 16}
    return parse_job({**base, "steps": 1_000_000, "precision": "fp32", "snapshot_every_steps": 0})


def _devices(numbers: str) -> tuple[Any, ...]:
    return tuple(CLUSTER.devices[int(number)] for number in numbers)


def _plan(spec: JobSpec, layout: str, devices: Sequence[Any]) -> Plan:
    return Plan.checked(
        Layout.parse(layout), tuple(devices), spec.model, spec.global_batch, spec.sequence_length, CLUSTER
    )


def _short(plan: Plan) -> str:
    layout = plan.layout
    return f"tp{layout.tp} pp{layout.pp} dp{layout.dp}"
