"""A rank's part of one move: prepared in a side thread while training goes on, carried out between two steps.

Nothing that the old generation uses is touched before the commit: kept buffers are shared read-only, the rest lies in
new memory. An abort therefore only has to forget the new generation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from suika.core.cluster_file import cluster_from_dict
from suika.core.plan import Plan
from suika.core.redeployment import Mode
from suika.reshard.links import Links
from suika.reshard.moveplan import MovePlan, plan_move
from suika.reshard.predict import pace_of
from suika.reshard.report import MoveReport
from suika.runtime import groups as process_groups
from suika.runtime import store as rendezvous
from suika.runtime.carriage import Carriage, Kept, Lean, choose_mode
from suika.runtime.generation import GROUP_TIMEOUT_S, Generation, RankJob
from suika.runtime.messages import Message
from suika.runtime.sockets import SocketWatch, is_broken_link
from suika.runtime.ways import Way, open_way

Say = Callable[..., None]
_STORE_TIMEOUT_S = 60.0


class AbortedError(RuntimeError):
    """The coordinator called the move off."""


class Handover:
    """One move as this rank lives it. `live` is None for a joiner; `new` stays None for a leaver.

    Three threads meet here: the control thread (`vote`, `decide`), the preparing one, and the main one (`enter`,
    `carry_out`, `verdict`).
    """

    def __init__(self, job: RankJob, order: Message, live: Generation | None, say: Say) -> None:
        self.number: int = order["generation"]
        self.wants_cut = False
        self.is_over = False  # called off before it was entered, and nothing of it is left
        self.new: Generation | None = None
        self._job, self._order, self._live, self._say = job, order, live, say
        self._watch: SocketWatch | None = None
        self._plan: MovePlan | None = None
        self._group: dist.ProcessGroup | None = None
        self._way: Way | None = None
        self._carriage: Carriage | None = None
        self._mode: Mode = "keep"
        self._lock = threading.Lock()
        self._entered = self._aborted = False
        self._decided = threading.Event()
        self._preparer = threading.Thread(target=self._prepare, name="prepare", daemon=True)
        self._preparer.start()

    def is_meant_by(self, message: Message) -> bool:
        """Whether `message` speaks of this very move. An abort may come before there is a plan to name."""
        same_plan = self._plan is None or message.get("digest", self._plan.digest) == self._plan.digest
        return message.get("generation") == self.number and same_plan

    # -- the preparing thread -----------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        try:
            plan = self._build()
        except Exception as error:
            self._say("unable", generation=self.number, error=f"prepare: {type(error).__name__}: {error}")
        else:
            said = {"digest": plan.digest, "mode": self._mode, "network_bytes": plan.network_bytes}
            self._say("prepared", generation=self.number, **said)

    def _build(self) -> MovePlan:
        """The move's plan, its group over all participants, and the new generation's groups and program."""
        job, order = self._job, self._order
        old, new = Plan.from_dict(order["old"]), Plan.from_dict(order["new"])
        cluster = cluster_from_dict(order["cluster"])
        plan = plan_move(job.shape, old, new, cluster, chunk_bytes=pace_of(cluster).chunk_bytes)
        watch = SocketWatch()
        store = rendezvous.join(**order["store"], timeout_s=_STORE_TIMEOUT_S)
        with self._lock:
            if self._aborted:
                raise AbortedError("called off before it began")
            self._watch = watch  # from now on an abort breaks what is being connected
        name = f"{job.job_id}/{self.number}/{plan.digest}/move"
        me, size = plan.index(job.device), len(plan.participants)
        self._group = process_groups.build_group(store, name, me, size, GROUP_TIMEOUT_S) if size > 1 else None
        if job.device in new.devices:
            self.new = Generation.build(job, self.number, new, store)
        device = next(g.program.device for g in (self.new, self._live) if g is not None)
        links = Links(cluster, plan.participants)
        way = self._way = open_way(self._group, links.node, device, store, name, GROUP_TIMEOUT_S)
        program = self._live.program if self._live is not None else None
        self._mode = choose_mode(plan, links, way, order["mode"])
        if self._mode == "lean":
            self._carriage = Lean(plan, links, job.device, program, way)
        else:
            self._carriage = Kept(plan, job.device, program, way)
        watch.close()
        self._plan = plan
        return plan

    # -- the control thread -------------------------------------------------------------------------------------------

    def decide(self, commit: bool, restore: bool = False) -> None:
        """The coordinator's verdict. On an abort whoever waits for a peer is woken up at once; but with `restore` all
        are there and the connections are needed for the way back."""
        with self._lock:
            self._aborted = not commit
            self.wants_cut = False
            self._decided.set()
            if not commit and not restore and self._watch is not None:
                self._watch.break_connections()
            if not commit and not self._entered:  # the main thread trains and will never hear of this move
                threading.Thread(target=self._withdraw, name="withdraw", daemon=True).start()

    def _withdraw(self) -> None:
        while self._preparer.is_alive():  # it may have been just about to open the next connection
            if self._watch is not None:
                self._watch.break_connections()
            self._preparer.join(0.05)
        self.discard()
        self.is_over = True
        self._say("resumed", generation=self.number)

    # -- the main thread ----------------------------------------------------------------------------------------------

    def enter(self) -> bool:
        """Begin the move between two steps; False if it has been called off."""
        with self._lock:
            self._entered = not self._aborted
            return self._entered

    def carry_out(self, step: int | None) -> None:
        """Move the state and make the new program ready with it; then wait for the verdict.

        `step`: steps done, None for a joiner. Raises `AbortedError` after an abort, with the old generation as it was.
        """
        try:
            report = self._move(step)
        except Exception as error:
            said = f"move: {type(error).__name__}: {error}"
            carriage = self._carriage
            lost = is_broken_link(error) or (carriage is not None and carriage.is_torn)
            alone = carriage is not None and carriage.is_alone
            self._say("unable", generation=self.number, error=said, link=lost, alone=alone)
        else:
            verify_s = report.phase_s["verify"]  # most hashes were taken while the wire worked
            self._say("verified", generation=self.number, received_bytes=report.received_bytes, verify_s=verify_s)
        self._decided.wait()
        if self._aborted:
            if self._carriage is not None:
                self._carriage.restore()
            raise AbortedError(f"generation {self.number} was called off")
        if self.new is not None:
            self._live = self._carriage = None  # what is not kept may go

    def _move(self, step: int | None) -> MoveReport:
        """Weights, then the rest; with `weights_first` the new program computes its next step's gradients meanwhile."""
        new, carriage, way = self.new, self._carriage, self._way
        assert carriage is not None, "entered before it was prepared"
        assert way is not None
        header = self._agree(carriage, step)
        if new is None:
            return carriage.carry(None, None)
        program = new.program

        def ready(buffers: Mapping[str, torch.Tensor]) -> None:
            program.bind(buffers)
            program.load_records(header["records"])

        # NCCL wants one order of launches on all ranks: while it carries the move the program's own groups stay idle.
        first = self._order["weights_first"] and way.wire != "nccl"
        return carriage.carry(ready, program.begin if first else None)

    def _agree(self, carriage: Carriage, step: int | None) -> dict[str, Any]:
        """The old ranks' step and records, on every participant; raises unless all carry out the same move of it."""
        records = self._live.program.records() if self._live is not None else None
        words = carriage.agree({"generation": self.number, "step": step, "records": records})
        (first, *others) = [word for word in words if word["step"] is not None]
        if any(word["generation"] != self.number for word in words) or any(other != first for other in others):
            raise RuntimeError(f"participants do not agree: {words}")
        assert isinstance(first, dict)
        return first

    def close(self) -> None:
        """The move's own connections are no longer needed."""
        self._preparer.join()
        if self._carriage is not None:
            self._carriage.join()
        if self._way is not None:
            self._way.close()
            self._way = None
        if self._group is not None:
            self._group.shutdown()
            self._group = None

    def discard(self) -> None:
        """After an abort: forget the new generation."""
        self.close()
        self._live = self._carriage = None
        if self.new is not None:
            self.new.destroy()
            self.new = None
