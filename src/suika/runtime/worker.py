"""A rank's process. The main thread trains; a control thread listens to the coordinator and never touches a tensor.

The process outlives layouts: it waits for orders, trains a generation, takes part in moves, and goes only when told to.
All ranks leave the training loop after the same step, because what they want (cut, stop, save) is summed up in the
step's own world all-reduce: every rank sees the same votes after the same step.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from suika.core.plan import Plan
from suika.runtime import groups as process_groups
from suika.runtime import recall
from suika.runtime import store as rendezvous
from suika.runtime.copier import Copier
from suika.runtime.events import Outcome
from suika.runtime.generation import Generation, RankJob
from suika.runtime.handover import AbortedError, Handover
from suika.runtime.messages import Channel, DisconnectedError, Message
from suika.runtime.profiler import STEADY, Profiler
from suika.runtime.program import StepResult
from suika.runtime.saver import Saver
from suika.runtime.sockets import is_broken_link

_STORE_TIMEOUT_S = 60.0
_SWITCH_WAIT_S = 60.0
_libc = ctypes.CDLL(None)


def main(channel: Channel, launch: Mapping[str, Any]) -> None:
    """Entry of a rank's process, called in the fork."""
    torch.set_num_threads(1)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor per buffer, and neighbours' in a move
    job = RankJob.of(launch)
    keep_to_a_core(job.device.index)
    rank = Rank(channel, job)
    rank.run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the kernel frees it all, cheaper than destructors, beside others that take their first step


def keep_to_a_core(index: int) -> None:
    """An emulated device is a core. With more ranks than cores, gloo's waiting threads otherwise chase each other from
    core to core: at load 34 the median step of a 2x2x2 job fell from 368 to 166 ms (docs/numbers.md). Ranks that share
    a core work in turns: by default whoever is sent a message interrupts the one that computes, and layouts that talk
    much lose up to half of their time in switches."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    with suppress(OSError):  # a sandbox may forbid it or not know it: slower, no less right
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Rank:
    """One device's process of a job."""

    def __init__(self, channel: Channel, job: RankJob) -> None:
        self._channel, self._job = channel, job
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()  # for the main thread
        self._live: Generation | None = None
        self._handover: Handover | None = None
        self._profiler: Profiler | None = None
        self._saver = Saver(job, self._say)
        self._copier = Copier(job, self._say)
        self._retired: list[Callable[[], None]] = []
        self._kept_to_the_end: Any = None
        self._switched = threading.Event()  # the main thread has gone over to a committed generation
        self._wants_stop = self._wants_save = False

    def run(self) -> None:
        """Obey until told to exit."""
        signal.signal(signal.SIGTERM, self._on_notice)
        threading.Thread(target=self._listen, name="control", daemon=True).start()
        self._say("ready", generation=0)
        while (order := self._orders.get())["do"] != "exit":
            try:
                if order["do"] == "start":
                    self._start(order)
                else:
                    self._join()
                if self._live is not None:
                    self._train()
            except Exception as error:
                traceback.print_exc()
                generation = self._live.number if self._live else order["generation"]
                said = {"error": f"{type(error).__name__}: {error}", "link": is_broken_link(error)}
                self._say("failed", generation=generation, **said)

    # -- the control thread -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while True:
                self._hear(self._channel.receive())
        except DisconnectedError:
            os._exit(1)  # the fork server is gone, and this job with it

    def _hear(self, message: Message) -> None:
        if message.get("job_id", self._job.job_id) != self._job.job_id:
            return
        handover = self._handover
        current = handover is not None and handover.is_meant_by(message)
        match message["do"]:
            case "ping":
                self._say("pong", generation=0)
            case "start" | "go" | "exit":
                self._orders.put(message)
            case "prepare":
                self._handover = Handover(self._job, message, self._live, self._say)
            case "cut" if current and handover is not None:
                handover.wants_cut = True
                if self._live is None:
                    self._orders.put(message)
            case "commit" if current and handover is not None:
                handover.decide(True)
                # The next order may be the next move's: it must find the new generation, not the one that is going.
                self._switched.wait(_SWITCH_WAIT_S)
                self._switched.clear()
            case "abort" if current and handover is not None:
                handover.decide(False, message.get("restore", False))
            case "abort":  # called off before this rank was asked to prepare
                self._say("resumed", generation=message["generation"])
            case "preempt":
                self._wants_stop = True
            case "snapshot":
                self._wants_save = True
            case "copy":
                self._copier.prepare(message, self._live)
            case "publish":
                self._saver.publish(message["generation"], message["step"])

    def _on_notice(self, *_: Any) -> None:
        """SIGTERM from whoever takes the machine away: one rank's vote is enough to save and stop them all."""
        self._wants_stop = True

    def _say(self, say: str, **content: Any) -> None:
        try:
            self._channel.send({"say": say, "job_id": self._job.job_id, **content})
        except DisconnectedError:
            os._exit(1)

    # -- the main thread ----------------------------------------------------------------------------------------------

    def _start(self, order: Message) -> None:
        store = rendezvous.join(**order["store"], timeout_s=_STORE_TIMEOUT_S)
        live = Generation.build(self._job, order["generation"], Plan.from_dict(order["plan"]), store)
        if order.get("recall") is None or not self._recall(live, order):
            live.fill(self._job, order["snapshot"])
        self._live = live
        self._say("running", generation=live.number, step=live.program.records()["steps_done"])

    def _recall(self, live: Generation, order: Message) -> bool:
        """Take the state from holders' memory. False: not all ranks could, so that none does."""
        try:
            live.furnish()
            recall.recall(order["recall"], self._job.shape, live.plan, live.rank, live.program.buffers())
        except Exception as error:
            self._say("unfilled", generation=live.number, error=f"{type(error).__name__}: {error}")
        else:
            self._say("filled", generation=live.number)
        if not self._orders.get()["recalled"]:
            return False
        live.program.load_records(order["recall"]["records"])
        return True

    def _join(self) -> None:
        """Take part in a move as a joiner, and train in the generation that it leads to."""
        assert self._handover is not None
        if self._handover.enter():
            self._switch(self._handover, None)

    def _train(self) -> None:
        """Step until the job ends or this rank leaves it."""
        steps, every = self._job.spec.steps, self._job.spec.snapshot_every_steps
        while (live := self._live) is not None:
            if live.program.records()["steps_done"] >= steps:
                self._end(live, Outcome.FINISHED)
                continue
            if every and (live.program.records()["steps_done"] + 1) % every == 0:
                self._wants_save = True  # due after the step that comes
            step = partial(live.program.step, self._votes(live))
            result, sample = self._profiler_of(live).step(step, self._beside)
            self._report(live, result)
            if sample is not None:
                self._say("sample", generation=live.number, sample=sample.to_dict())
            self._retire()
            cut, stop, save, busy, copy = result.votes
            if result.step >= steps:
                continue
            if stop:
                self._end(live, Outcome.PREEMPTED)
            elif cut == live.plan.layout.num_ranks:
                self._cut(result.step)
            else:
                if copy == live.plan.layout.num_ranks:
                    self._copier.copy(live, result.step)
                if save and not busy:  # while an earlier one is being written training goes on, and this one waits
                    self._wants_save = False
                    self._saver.save(live, result.step)

    def _profiler_of(self, live: Generation) -> Profiler:
        if self._profiler is None or self._profiler.generation != live.number:
            self._profiler = Profiler(self._job.job_id, live.number, live.rank)
        return self._profiler

    def _beside(self) -> str:
        """What takes processor time beside training."""
        handover = self._handover
        if handover is not None and not handover.is_over:
            return "move"
        return "snapshot" if self._saver.is_writing or self._copier.is_busy else STEADY

    def _votes(self, live: Generation) -> tuple[float, ...]:
        """Of the step that comes: cut, stop, save a snapshot, busy with the one before, copy into memory."""
        handover = self._handover
        cut = handover is not None and handover.wants_cut
        votes = cut, self._wants_stop, self._wants_save, self._saver.is_writing, self._copier.wants(live)
        return tuple(map(float, votes))

    def _report(self, live: Generation, result: StepResult) -> None:
        if live.rank == 0:
            numbers = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr}
            finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
            self._say("step", generation=live.number, step=result.step, num_tokens=result.num_tokens, **finite)

    def _cut(self, step: int) -> None:
        """All ranks voted for it: this rank's part of the move, unless it has been called off meanwhile."""
        handover = self._handover
        if handover is not None and handover.enter():
            self._say("cut", generation=handover.number, step=step)
            self._switch(handover, step)

    def _switch(self, handover: Handover, step: int | None) -> None:
        """Carry the move out; afterwards the live generation is the new one, or after an abort still the old one."""
        try:
            handover.carry_out(step)
        except AbortedError:
            handover.discard()
            self._handover = None
            self._say("resumed", generation=handover.number)
            return
        old, self._live, self._handover = self._live, handover.new, None
        self._switched.set()
        if self._live is not None:
            self._retired = [handover.close]
            if old is not None:
                # Its memory is free already, to be used by the first step: kept for a step longer, 1.5 GB that grew
                # from two devices to four paused 0.7 s longer.
                self._retired.append(partial(process_groups.destroy, old.groups))
        else:
            self._kept_to_the_end = old, handover  # a leaver is told to go at once, and that frees everything

    def _retire(self) -> None:
        """Once the pause is over: close what the last move left over, and give its memory back to the system."""
        if self._retired:
            while self._retired:
                self._retired.pop()()
            gc.collect()
            _libc.malloc_trim(0)

    def _end(self, live: Generation, outcome: Outcome) -> None:
        """Save the state after the last step and wait to be told to go: no rank exits alone."""
        step = live.program.records()["steps_done"]
        self._saver.save(live, step)
        self._saver.join()
        self._say("ended", generation=live.number, step=step, outcome=outcome.value)
        self._live = None
