"""A seeded injector walks the protocol: at any named point of a move, in either mode, any process is killed or stopped,
cut off from the network, refused memory, or made to raise what nobody expects.

Either the old generation goes on at the same step or the new one does, or the job falls back to its snapshot and says
what it lost. It never hangs, never mixes the two, and its state stays exact to the bit.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from suika.core.redeployment import Mode, Phase, Redeployment
from suika.runtime.events import Ended, JobEvent, Moving, Outcome, Snapshotted, StepDone

from .conftest import MODEL, USER, Watched, plan, spec
from .test_moves import assert_state_is_exact
from .tiny_program import FAULT, lay_ready

OLD = ("tp=2,pp=1,dp=2", "a0 a1 b0 b1")
NEW = ("tp=1,pp=3,dp=1", "a0 b0 b2")  # a0 and b0 stay, a1 and b1 leave, b2 joins
LARGER = {**MODEL, "hidden": 192, "ffn": 512}  # four pieces of two chunks
PHASES = (Phase.PREPARE, Phase.CUT, Phase.MOVE, Phase.COMMIT)
NEVER_LOST = 5.0, 20.0  # s within which a killed, a stopped process is noticed


class Fault(NamedTuple):
    """`point`: a phase as the coordinator enters it, or a call of the program inside the rank. `build` and `buffers`
    come in prepare; `bind` and `load_records` when weights have arrived and all else is still to come; `begin` is the
    pass that runs while it comes."""

    point: str
    device: str  # or "store"
    do: str  # a signal, "cut", "refuse" or "raise"
    mode: Mode = "keep"  # in a lean move there are points in between: `piece-<number>`, as a participant begins it

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.point}-{self.device.replace('/', '')}-{self.do}"


def _keep_faults() -> list[Fault]:
    outside = itertools.product(PHASES, ("a/0", "a/1", "b/0", "b/2", "store"))
    arriving = list(itertools.product(("bind", "load_records", "begin"), ("a/0", "b/2")))
    inside = itertools.product(("build", "step"), ("a/0", "b/2"))
    old_side = itertools.product(("buffers",), ("a/0", "a/1"))
    places = [*outside, *arriving, *inside, *old_side]
    signals = [Fault(point, device, do) for point, device in places for do in ("SIGKILL", "SIGSTOP")]
    return signals + [Fault(point, device, do) for point, device in arriving for do in ("cut", "refuse")]


def _lean_faults() -> list[Fault]:
    """a0 stays, a1 leaves, b2 joins; all take part in every piece, and only who gets new buffers can be refused any."""
    outside = itertools.product(PHASES, ("a/0", "a/1", "b/2", "store"))
    between = itertools.product(("piece-0", "piece-1", "piece-3"), ("a/0", "a/1", "b/2"))
    arrived = itertools.product(("bind", "load_records"), ("a/0", "b/2"))
    signals = itertools.product((*outside, *between, *arrived), ("SIGKILL", "SIGSTOP"))
    others = [
        *itertools.product((("piece-0", "a/0"), ("piece-1", "a/0"), ("piece-3", "b/2")), ("refuse", "cut", "raise")),
        *itertools.product((("piece-0", "a/1"), ("piece-2", "b/2")), ("cut", "raise")),
        *itertools.product(itertools.product(("bind", "load_records"), ("a/0", "b/2")), ("refuse", "cut", "raise")),
        (("let-go", "a/0"), "refuse"),
    ]
    return [Fault(point, device, do, "lean") for (point, device), do in (*signals, *others)]


def _chosen(faults: list[Fault], seed: int, num: int) -> list[Fault]:
    return random.Random(seed).sample(faults, num)


def _arm(job_run: Watched, folder: Path, fault: Fault) -> None:
    if fault.point not in PHASES:
        old_side = fault.point in ("buffers", "let-go")
        ranks = 0 if fault.point.startswith("piece") else 4 if old_side else 3
        point = "bind" if fault.point == "let-go" else fault.point  # the old program is bound to nothing
        lay_ready(folder, {"at": [point, fault.device, ranks], "do": fault.do})
        return

    def strike(event: JobEvent) -> None:
        if isinstance(event, Moving) and event.record.phase == fault.point:
            members = job_run.gang.members.values()
            wanted = None if fault.device == "store" else fault.device
            member = next(m for m in members if (str(m.device) if m.device else None) == wanted)
            while member.pid is None:
                job_run.gang.pump()
            os.kill(member.pid, signal.Signals[fault.do])

    job_run.hook = strike


def _check_lean(fault: Fault, record: Redeployment | None, ended: Ended | None) -> None:
    """While pieces are on their way a death, a cut link or half a move is a loss; what all hear of is carried back."""
    torn = fault.do == "raise" and fault.point.startswith("piece") and fault.point != "piece-0"
    if fault.do in ("SIGKILL", "SIGSTOP", "cut") or torn:
        assert ended is not None
        assert ended.outcome == Outcome.LOST
        assert fault.do == "cut" or torn or [str(device) for device in ended.dead] == [fault.device]
    else:
        assert ended is None
        assert record is not None
        assert record.phase == Phase.ABORTED
        assert "as the test wanted" in record.error, "not the first error"


def _check(fault: Fault, record: Redeployment | None, ended: Ended | None) -> None:
    """What must have come of it, by who was struck when."""
    # Ranks do not wait for the coordinator to enter MOVE: who is struck then may have verified all already.
    overtaken = fault.point == Phase.MOVE and record is not None and record.phase == Phase.RELEASE
    under_way = fault.point not in (Phase.PREPARE, Phase.CUT, Phase.COMMIT) and not overtaken
    if fault.point == Phase.CUT and fault.do == "SIGSTOP" and record is None:
        under_way = True  # it was noticed when the others were in the move already
    if fault.mode == "lean" and under_way and fault.device != "store":
        _check_lean(fault, record, ended)
        return
    before_commit = fault.point not in (Phase.COMMIT, "step") and not overtaken
    if fault.do in ("cut", "refuse"):
        assert record is not None
        assert record.phase == Phase.ABORTED
        assert fault.device.replace("/", "") in record.error.replace("/", "") or fault.do == "cut"
        assert ("refused, as the test wanted" in record.error) == (fault.do == "refuse"), "not the first error"
        assert (ended is not None) == (fault.do == "cut" and fault.device == "a/0"), "who is cut off cannot train on"
        assert ended is None or ended.outcome == Outcome.LOST
    elif fault.device == "b/2" and before_commit:
        assert ended is None
        assert record is not None
        assert record.phase == Phase.ABORTED
    elif (
        fault.device in ("a/0", "b/0")
        or (fault.device == "a/1" and before_commit)
        or (fault.device == "b/2" and overtaken)
    ):
        assert ended is not None
        assert ended.outcome == Outcome.LOST
        assert [str(device) for device in ended.dead] == [fault.device]
    elif fault.device == "a/1":
        assert record is not None
        assert record.phase == Phase.RELEASE, "a leaver is not needed after the commit"


@pytest.mark.fault
@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    "fault",
    [
        *(pytest.param(fault, id=fault.name) for fault in _chosen(_keep_faults(), seed=1, num=16)),
        *(pytest.param(fault, id=fault.name) for fault in _chosen(_lean_faults(), seed=1, num=8)),
        *(
            pytest.param(fault, id=f"all-{fault.name}", marks=pytest.mark.long)
            for fault in (*_keep_faults(), *_lean_faults())
        ),
    ],
)
def test_any_process_at_any_point(run: Callable[..., Watched], tmp_path: Path, fault: Fault) -> None:
    job = spec(snapshot_every_steps=5, model=LARGER if fault.mode == "lean" else MODEL)
    job_run = run(job)
    job_run.start(plan(*OLD, job), 1).result(60)
    job_run.wait(Snapshotted)
    _arm(job_run, tmp_path, fault)
    began_s = time.monotonic()
    first = fault.mode == "keep" and fault.point in ("bind", "begin")
    moved = job_run.redeploy(plan(*NEW, job), 2, USER, weights_first=first, mode=fault.mode)
    moved.exception(60)
    record = moved.result() if moved.exception() is None else None
    if record is not None:
        settled = time.monotonic() + 12  # a death after the commit shows a little later
        while time.monotonic() < settled and job_run.ranks and job_run.step < (record.cut_step or 0) + 3:
            time.sleep(0.01)
        if not job_run.ranks:  # they are given up a moment before it is said
            job_run.wait(Ended)
    ended = next((event for event in job_run.events if isinstance(event, Ended)), None)
    notice_s = NEVER_LOST[fault.do == "SIGSTOP"]
    assert time.monotonic() - began_s < notice_s + 10
    _check(fault, record, ended)
    (tmp_path / FAULT).unlink(missing_ok=True)
    job_run.hook = lambda event: None
    first_again = 1
    if ended is not None:
        assert ended.noticed_s < notice_s
        job_run.start(plan("tp=1,pp=1,dp=3", "a2 a3 b3", job), 3, ended.snapshot).result(60)
        first_again = ended.snapshot_step + 1
    elif record is not None and record.phase == Phase.ABORTED and record.cut_step is not None:
        job_run.wait(StepDone, generation=1, step=record.cut_step + 1)
    job_run.wait_steps(2)
    last = job_run.preempt().result(60)
    assert_state_is_exact(Path(last.snapshot), job, last.step)
    if ended is None:
        steps = [event.step for event in job_run.events if isinstance(event, StepDone)]
        assert steps == list(range(first_again, last.step + 1))
