"""The ranks of one emulated job: they step, vote, move and save together, as their real counterparts do.

Progress is exact arithmetic on the clock: a generation that began at `began_s` with `first` steps done has done
floor((now - began_s) / step) more. Rank 0 reports at the ends of steps, no more often than every `REPORT_EVERY_S`, so
that a fast job on a fast clock does not drown the controller; a report names the step, so none is lost by that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from suika.core.cluster import Device
from suika.core.job import JobSpec, parse_job
from suika.core.plan import Plan
from suika.runtime.messages import Message

if TYPE_CHECKING:
    from suika.agent.emulated import EmulatedProcess, Emulation

REPORT_EVERY_S = 0.25  # real seconds between a job's reports of its steps
_SLACK = 1e-6  # of a step: the end of a step is not missed by rounding


@dataclass(frozen=True)
class MovePrice:
    """Emulated seconds: `prepare_s` beside training, `pause_s` without, and from the cut until leavers have given
    everything away; and what the ranks would have received."""

    prepare_s: float
    pause_s: float
    leave_s: float
    moved_bytes: int
    network_bytes: int


class Prices(Protocol):
    """What the emulated world's seconds are made of: the same as what the simulator charges."""

    def step_s(self, spec: JobSpec, plan: Plan) -> float: ...

    def launch_s(self, spec: JobSpec, plan: Plan, resumed: bool) -> float:
        """From the fork to the beginning of the first step."""
        ...

    def save_s(self, spec: JobSpec, plan: Plan) -> float:
        """To write the whole state before all devices are given up."""
        ...

    def move(self, spec: JobSpec, old: Plan, new: Plan) -> MovePrice: ...


@dataclass
class _Live:
    """The generation that trains, or that stands while `began_s` is None."""

    number: int
    plan: Plan
    step_real_s: float
    first: int  # steps done when it began
    began_s: float | None
    reported: int
    saved: int  # the newest step that was written as a snapshot
    look: int = 0  # counts the looks that were planned: only the newest is carried out

    def done(self, now_s: float) -> int:
        """Steps done at `now_s`."""
        if self.began_s is None:
            return self.first
        return self.first + max(0, math.floor((now_s - self.began_s) / self.step_real_s + _SLACK))

    def end_of(self, step: int) -> float:
        """When `step` steps are done."""
        assert self.began_s is not None
        return self.began_s + (step - self.first) * self.step_real_s


@dataclass
class _Move:
    number: int
    digest: str
    old: Plan
    new: Plan
    price: MovePrice
    asked: set[str]  # who was told to prepare
    cut: set[str]  # who was told to cut
    stands: bool = False  # since the cut


class EmulatedJob:
    """All on the emulation's thread. `ranks`: the processes that live, by device."""

    def __init__(self, emulation: Emulation, job_id: str, launch: Mapping[str, Any]) -> None:
        self._world, self.job_id = emulation, job_id
        self.spec = parse_job(launch["spec"])
        self._snapshots = Path(launch["snapshots"])
        self.ranks: dict[Device, EmulatedProcess] = {}
        self._forked_s = emulation.clock()
        self._live: _Live | None = None
        self._move: _Move | None = None
        self._waiting: dict[str, Message] = {}  # start orders, until all ranks of the plan have theirs
        self._wants_stop = self._wants_save = False
        self._leaving_until_s = 0.0  # what leavers hold is still on its way to others

    def join(self, process: EmulatedProcess) -> None:
        assert process.device is not None
        if self._live is None:
            self._forked_s = self._world.clock()
        self.ranks[process.device] = process
        self._world.say(process, "ready")

    def leave(self, process: EmulatedProcess) -> None:
        """A rank is gone. If the present generation needed it the others hang, until they are ended too."""
        assert process.device is not None
        del self.ranks[process.device]
        if self._live is not None and process.device in self._live.plan.devices:
            self._live = None

    def may_go_at(self, process: EmulatedProcess) -> float:
        """When `process` has nothing left to give away."""
        assert process.device is not None
        stays = self._live is not None and process.device in self._live.plan.devices
        return 0.0 if stays else self._leaving_until_s

    def hear(self, process: EmulatedProcess, order: Message) -> None:
        match order["do"]:
            case "start":
                self._start(process, order)
            case "prepare":
                self._prepare(process, order)
            case "cut" if self._is_current(order):
                self._vote_to_cut(process)
            case "commit" if self._is_current(order):
                self._commit()
            case "abort":
                self._abort(process, order)
            case "preempt":
                self._wants_stop = True
                self._look_after_this_step()
            case "snapshot":
                self._wants_save = True
                self._look_after_this_step()
            case "publish":
                self._publish(process, order)

    def _is_current(self, order: Message) -> bool:
        return self._move is not None and order["generation"] == self._move.number

    # -- starting -------------------------------------------------------------------------------------------------

    def _start(self, process: EmulatedProcess, order: Message) -> None:
        self._waiting[process.name] = order
        plan = Plan.from_dict(order["plan"])
        here = [self.ranks.get(device) for device in plan.devices]
        if any(rank is None for rank in here):
            error = "the ranks of an emulated job must be emulated by one agent process"
            self._world.say(process, "failed", order["generation"], error=error)
            return
        if any(rank is not None and rank.name not in self._waiting for rank in here):
            return
        self._waiting.clear()
        try:
            first = _step_of(order["snapshot"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"{order['snapshot']} is no snapshot of an emulated job: {error}"
            self._world.say(process, "failed", order["generation"], error=why)
            return
        launch_s = self._world.real_s(self._world.prices.launch_s(self.spec, plan, order["snapshot"] is not None))
        began_s = max(self._forked_s + launch_s, self._world.clock())
        self._go_on(order["generation"], plan, first, began_s)
        for device in plan.devices:
            self._world.say(self.ranks[device], "running", order["generation"], step=first)

    def _go_on(self, number: int, plan: Plan, first: int, began_s: float) -> None:
        """Train generation `number` from `began_s` on."""
        step_s = self._world.real_s(self._world.prices.step_s(self.spec, plan))
        self._live = _Live(number, plan, step_s, first, began_s, reported=first, saved=first)
        self._look_after(self._live, first + 1)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _look_after_this_step(self) -> None:
        """At the end of the step in progress: somebody has asked for something."""
        live = self._live
        if live is not None and live.began_s is not None:
            self._look_after(live, live.done(self._world.clock()) + 1)

    def _look_after(self, live: _Live, step: int) -> None:
        step = min(step, self.spec.steps)
        live.look += 1
        number = live.look

        def look() -> None:
            if self._live is live and live.look == number and live.began_s is not None:
                self._after_step(live, step)

        self._world.at(live.end_of(step), look)

    def _after_step(self, live: _Live, step: int) -> None:
        """All ranks are done with `step`: what they have agreed on happens now."""
        self._report(live, step)
        if step >= self.spec.steps:
            self._end(live, "finished")
        elif self._wants_stop:
            self._end(live, "preempted")
        elif self._move is not None and self._all_will_cut(self._move):
            self._cut(live, self._move, step)
        else:
            every = self.spec.snapshot_every_steps
            if self._wants_save or (every and step // every > live.saved // every):
                self._save(live, step)
            steps_ahead = max(1, math.ceil(REPORT_EVERY_S / live.step_real_s))
            self._look_after(live, step + steps_ahead)

    def _report(self, live: _Live, step: int) -> None:
        num_tokens = self.spec.global_batch * self.spec.sequence_length
        live.reported = step
        rank = self.ranks[live.plan.devices[0]]
        self._world.say(rank, "step", live.number, step=step, loss=None, grad_norm=None, lr=None, num_tokens=num_tokens)

    def _save(self, live: _Live, step: int) -> None:
        self._wants_save, live.saved = False, step
        for device in live.plan.devices:
            self._world.say(self.ranks[device], "written", live.number, step=step, stall_s=0.0)

    def _publish(self, process: EmulatedProcess, order: Message) -> None:
        """All have written: from now on it is a snapshot; the one before the last is forgotten."""
        self._snapshots.mkdir(parents=True, exist_ok=True)
        path = self._snapshots / f"emulated-{order['step']:012d}.json"
        path.write_text(json.dumps({"step": order["step"], "generation": order["generation"]}))
        for old in sorted(self._snapshots.glob("emulated-*.json"))[:-2]:
            with suppress(FileNotFoundError):
                old.unlink()
        self._world.say(process, "published", order["generation"], step=order["step"], path=str(path))

    def _end(self, live: _Live, outcome: str) -> None:
        """Save the state and wait to be let go. Only a preemption is charged for it, as in simulation."""
        step = live.reported
        live.first, live.began_s = step, None
        save_s = self._world.prices.save_s(self.spec, live.plan) if outcome == "preempted" else 0.0

        def saved() -> None:
            if self._live is live:
                self._save(live, step)
                for device in live.plan.devices:
                    self._world.say(self.ranks[device], "ended", live.number, step=step, outcome=outcome)

        self._wants_stop = False
        self._world.at(self._world.clock() + self._world.real_s(save_s), saved)

    # -- moving ---------------------------------------------------------------------------------------------------

    def _prepare(self, process: EmulatedProcess, order: Message) -> None:
        number = order["generation"]
        if self._move is None or self._move.number != number:
            old, new = Plan.from_dict(order["old"]), Plan.from_dict(order["new"])
            price = self._world.prices.move(self.spec, old, new)
            self._move = _Move(number, f"{old.digest}-{new.digest}", old, new, price, set(), set())
        move = self._move
        move.asked.add(process.name)

        def prepared() -> None:
            if self._move is move and process.name in self._world.processes:
                content = {"digest": move.digest, "mode": "keep", "network_bytes": move.price.network_bytes}
                self._world.say(process, "prepared", number, **content)

        self._world.at(self._world.clock() + self._world.real_s(move.price.prepare_s), prepared)

    def _vote_to_cut(self, process: EmulatedProcess) -> None:
        assert self._move is not None
        self._move.cut.add(process.name)
        if self._all_will_cut(self._move):
            self._look_after_this_step()

    def _all_will_cut(self, move: _Move) -> bool:
        old = [self.ranks.get(device) for device in move.old.devices]
        return not move.stands and all(rank is not None and rank.name in move.cut for rank in old)

    def _cut(self, live: _Live, move: _Move, step: int) -> None:
        """Training stands; the state arrives and is checked within the pause."""
        now_s = self._world.clock()
        live.first, live.began_s, move.stands = step, None, True
        self._leaving_until_s = now_s + self._world.real_s(move.price.leave_s)
        for device in move.old.devices:
            self._world.say(self.ranks[device], "cut", move.number, step=step)
        taking_part = dict.fromkeys((*move.old.devices, *move.new.devices))
        share, rest = divmod(move.price.moved_bytes, len(taking_part))

        def arrived() -> None:
            if self._move is move:
                for index, device in enumerate(taking_part):
                    if (rank := self.ranks.get(device)) is not None:
                        received = share + (rest if index == 0 else 0)
                        self._world.say(rank, "verified", move.number, received_bytes=received, verify_s=0.0)

        self._world.at(now_s + self._world.real_s(move.price.pause_s), arrived)

    def _commit(self) -> None:
        move, live = self._move, self._live
        self._move = None
        if move is None or live is None or any(device not in self.ranks for device in move.new.devices):
            return  # a rank is gone: the others hang, until they are ended
        self._go_on(move.number, move.new, live.first, self._world.clock())

    def _abort(self, process: EmulatedProcess, order: Message) -> None:
        live = self._live
        if self._is_current(order):
            self._move = None
            if live is not None and live.began_s is None:
                self._go_on(live.number, live.plan, live.first, self._world.clock())
        self._world.say(process, "resumed", order["generation"])


def _step_of(snapshot: str | None) -> int:
    return 0 if snapshot is None else int(json.loads(Path(snapshot).read_text())["step"])
