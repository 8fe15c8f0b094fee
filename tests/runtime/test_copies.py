"""Copies in memory: which parts lie where, whole and unchanged into any layout, and what is left after deaths."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from suika.core.job import JobSpec
from suika.core.plan import Plan
from suika.reshard.state import JobShape
from suika.runtime.copier import fill, give
from suika.runtime.events import Copied, Ended, Outcome, Snapshotted, Started, StepDone, Uncopied
from suika.runtime.holder import Holder, Key, room
from suika.runtime.pieces import is_whole, own_bytes, shares
from suika.runtime.program import RankGroups
from suika.runtime.recall import RecallError, recall
from suika.runtime.rooms import NodeMemory

from .conftest import USER, Watched, plan, spec
from .test_moves import assert_state_is_exact
from .tiny_program import TinyProgram

NOBODY = RankGroups(None, None, None, None, None)
LAYOUTS = [
    ("tp=1,pp=1,dp=1", "a0"),
    ("tp=2,pp=1,dp=3", "a0 a1 a2 b1 b0 b2"),
    ("tp=2,pp=1,dp=2,zero=0", "a0 a1 b0 b1"),
    ("tp=1,pp=2,dp=2,layers_per_stage=1:2", "a0 b1 a2 b3"),
    ("tp=1,pp=3,dp=1", "b0 a1 a0"),
]
WIDE = ("tp=2,pp=1,dp=2", "a0 a1 b0 b1")
ONE_NODE = ("tp=2,pp=1,dp=1", "a0 a1")
OTHER = {"a": "b", "b": "a"}


def with_copies(own: dict[str, tuple[int, int]]) -> dict[str, int]:
    """What one set takes on each of two nodes."""
    return {node: num_bytes + own[OTHER[node]][1] for node, (num_bytes, _) in own.items()}


# -- what lies where --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_each_node_alone_has_all_of_the_state(layout: tuple[str, str]) -> None:
    job = spec()
    target, shape = plan(*layout, job), JobShape.of(job)
    nodes = [device.node for device in target.devices]
    for node in ("a", "b"):
        own = [rank for rank, place in enumerate(nodes) if place == node]
        copied = [rank for rank, place in enumerate(nodes) if place != node]
        assert is_whole(shape, target, own, copied)
        assert not is_whole(shape, target, own[1:], copied)
        mine = [shares(shape, target)[rank] for rank in own]
        predicted = sum(share.num_bytes for share in mine), sum(share.alone_bytes for share in mine)
        assert own_bytes(shape, target)[node] == predicted
    elements = sum(piece.box.numel for share in shares(shape, target) for piece in share.pieces)
    elements += sum(piece.box.numel for share in shares(shape, target) for piece in share.pieces[: share.num_alone])
    whole = sum(piece.box.numel for piece in shares(shape, plan(*LAYOUTS[0], job))[0].pieces)
    assert elements == 2 * whole, "each element lies on two nodes, no more"


def test_what_replicas_hold_already_is_not_sent() -> None:
    job = spec()
    assert all(share.num_alone == 0 for share in shares(JobShape.of(job), plan(*LAYOUTS[2], job)))
    sliced = shares(JobShape.of(job), plan(*WIDE, job))
    kinds = {piece.region.key.kind for share in sliced for piece in share.pieces[: share.num_alone]}
    assert kinds == {"m", "v"}, "moments are sliced: each has one owner; weights are on both nodes"


# -- in one process, with real holders --------------------------------------------------------------------------------


class Held:
    """What two holders said, by node."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self.said: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}
        self.holders = {node: Holder(self._listen(node)) for node in ("a", "b")}

    def _listen(self, node: str) -> Callable[..., None]:
        def say(word: str, **content: Any) -> None:
            with self._news:
                self.said[node].append({"say": word, **content})
                self._news.notify_all()

        return say

    def wait(self, num: int) -> None:
        """Until so many shares, and copies of them, are held."""

        def held() -> int:
            return sum(word["say"] == "held" for said in self.said.values() for word in said)

        with self._news:
            assert self._news.wait_for(lambda: held() >= num, 10), self.said

    def order(self, source: Plan, nodes: str = "ab") -> dict[str, Any]:
        order: dict[str, Any] = {"generation": 1, "step": 7, "plan": source.to_dict()}
        order |= {"own": {}, "copied": {}}
        for node in nodes:
            address = self.holders[node].address
            for message in self.said[node]:
                if message["say"] == "held":
                    where = order["copied" if message["copied"] else "own"]
                    where[str(message["rank"])] = {"node": node, **address}
        return order


@contextmanager
def _held(job: JobSpec, source: Plan) -> Iterator[Held]:
    """The state of `source` at step 7, given to the holders of its nodes as ranks do it."""
    held, shape = Held(), JobShape.of(job)
    after = OTHER if len(own_bytes(shape, source)) > 1 else {}
    for holder in held.holders.values():
        holder.serve()
    expected = 0
    for rank, share in enumerate(shares(shape, source)):
        node, memory = source.devices[rank].node, room(share.num_bytes)
        fill(memory, share, _filled(job, source, rank))
        header = {"generation": 1, "step": 7, "rank": rank, "num_bytes": share.num_bytes}
        header["token"] = held.holders[node].address["token"]
        header |= {"alone": share.num_alone if after else 0, "alone_bytes": share.alone_bytes, "meta": {}, "stall_s": 0}
        header |= {"offsets": share.offsets[:-1], "sizes": share.num_bytes_of}
        header["next"] = held.holders[after[node]].address if after else None
        give(held.holders[node].address["line"], header, memory)
        expected += 1 + (header["alone"] > 0)
    held.wait(expected)
    yield held
    for holder in held.holders.values():
        holder.close()


def _filled(job: JobSpec, target: Plan, rank: int) -> dict[str, torch.Tensor]:
    program = TinyProgram(job, target, rank, NOBODY, "")
    program.bind(program.initialise())
    return dict(program.buffers())


def _assert_recalled(job: JobSpec, order: dict[str, Any], target: Plan) -> None:
    for rank in range(target.layout.num_ranks):
        expected = _filled(job, target, rank)
        buffers = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
        recall(order, JobShape.of(job), target, rank, buffers)
        for name, tensor in expected.items():
            assert torch.equal(buffers[name], tensor), (str(target.layout), name)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("source", range(len(LAYOUTS)))
def test_every_layout_recalls_what_every_layout_copied(source: int, precision: str) -> None:
    """To the bit, from all holders and from those of one node."""
    job = spec(precision=precision)
    old = plan(*LAYOUTS[source], job)
    with _held(job, old) as held:
        for target, nodes in itertools.product(LAYOUTS, ["ab", "a", "b"] if source else ["a"]):
            _assert_recalled(job, held.order(old, nodes), plan(*target, job))


def test_what_has_changed_is_noticed_and_taken_from_the_other_node() -> None:
    job, source = spec(), plan(*LAYOUTS[4], spec())
    with _held(job, source) as held:
        held.holders["a"]._held[Key(1, 7, 1, False)].memory[3] ^= 1
        _assert_recalled(job, held.order(source), plan(*LAYOUTS[1], job))
        with pytest.raises(RecallError, match="it has changed since it was handed over"):
            _assert_recalled(job, held.order(source, "a"), plan(*LAYOUTS[1], job))
        with pytest.raises(RecallError, match="no holder has it"):
            _assert_recalled(job, held.order(source, ""), plan(*LAYOUTS[1], job))


def test_a_holder_takes_and_shows_nothing_without_the_token() -> None:
    job, source = spec(), plan(*LAYOUTS[4], spec())
    with _held(job, source) as held:
        order = held.order(source)
        for holder in (*order["own"].values(), *order["copied"].values()):
            holder["token"] = "another"
        with pytest.raises(RecallError, match="closed the line"):
            _assert_recalled(job, order, source)
        share = shares(JobShape.of(job), source)[0]
        with pytest.raises(OSError, match="closed the line"):
            give(held.holders["a"].address["line"], {"token": "another", "num_bytes": 64}, room(share.num_bytes))


def test_what_a_share_takes_is_said_before_it_counts() -> None:
    """Who is refused room for the next set is left with what is known to be held of this one."""
    with _held(spec(), plan(*WIDE, spec())) as held:
        for said in held.said.values():
            known = counted = 0
            for word in said:
                if word["say"] == "holding":
                    known = word["num_bytes"]
                else:
                    counted += word["num_bytes"]
                    assert known >= counted
            assert known == counted > 0


def test_dropped_sets_give_their_memory_back_and_take_nothing_late() -> None:
    job, source = spec(), plan(*LAYOUTS[4], spec())
    with _held(job, source) as held:
        predicted = with_copies(own_bytes(JobShape.of(job), source))
        assert {node: holder.num_bytes for node, holder in held.holders.items()} == predicted
        for holder in held.holders.values():
            holder.obey({"do": "drop", "before": (1, 8), "sets": []})
            assert holder.num_bytes == 0


def test_a_copy_is_refused_where_memory_is_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suika.reshard.transports.memfd.available_bytes", lambda: 1999)
    with pytest.raises(MemoryError, match="a copy of 1000 bytes is kept only where twice that is free; 1999 bytes are"):
        room(1000)


# -- with real processes ----------------------------------------------------------------------------------------------


def _started(run: Callable[..., Watched], layout: tuple[str, str], **more: Any) -> tuple[Watched, JobSpec]:
    """A job that has one snapshot, and copies in memory that are newer."""
    job = spec(memory_copy_every_steps=5, **more)
    job_run = run(job)
    job_run.start(plan(*layout, job), 1).result(60)
    job_run.snapshot().result(60)
    saved = job_run.wait(Snapshotted).step
    wait_copied(job_run, saved + 5)
    return job_run, job


def wait_copied(job_run: Watched, step: int, timeout_s: float = 60) -> Copied:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for event in list(job_run.events):
            if isinstance(event, Copied) and event.step >= step:
                return event
        time.sleep(0.01)
    raise AssertionError(f"no copy of step {step} or later: {job_run.copies.error}")


def strike_node(job_run: Watched, node: str, do: str) -> None:
    """All processes of the job on an emulated node: killed, as when its power fails, or stopped, as when nothing can
    reach it any more."""
    pids = [member.pid for device, member in job_run.ranks.items() if device.node == node]
    for pid in (*pids, *job_run.copies.pids(node)):
        with suppress(ProcessLookupError):  # a holder that has just ended by itself
            os.kill(pid, signal.Signals[do])


def goes_on(job_run: Watched, job: JobSpec, snapshot: str | None, layout: tuple[str, str]) -> Started:
    """Start again from `snapshot`; the state is exact after some more steps."""
    job_run.start(plan(*layout, job), 2, snapshot).result(60)
    started = job_run.wait(Started, generation=2)
    job_run.wait_steps(3)
    last = job_run.preempt().result(60)
    assert_state_is_exact(Path(last.snapshot), job, last.step)
    return started


@pytest.mark.parametrize(
    ("layout", "do"),
    [
        (WIDE, "SIGKILL"),
        pytest.param(WIDE, "SIGSTOP", marks=pytest.mark.fault),
        pytest.param(("tp=1,pp=3,dp=1", "b0 b1 a0"), "SIGKILL", marks=pytest.mark.fault),
        pytest.param(("tp=2,pp=1,dp=2,zero=0", "a0 b0 a1 b1"), "SIGKILL", marks=pytest.mark.fault),
    ],
)
def test_a_node_that_is_gone_costs_the_steps_since_the_last_copy(
    run: Callable[..., Watched], layout: tuple[str, str], do: str
) -> None:
    job_run, job = _started(run, layout)
    strike_node(job_run, "b", do)
    ended = job_run.wait(Ended)
    assert ended.outcome == Outcome.LOST
    assert ended.snapshot.startswith("memory:")
    assert ended.steps_lost == ended.step - ended.snapshot_step
    assert ended.snapshot_step > job_run.keeper.newest[1], "newer than what is on disk"
    started = goes_on(job_run, job, ended.snapshot, ("tp=1,pp=1,dp=3", "a1 a2 a3"))
    assert (started.resumed_step, started.fell_back) == (ended.snapshot_step, None)
    assert started.copies == ended.snapshot
    assert not job_run.copies.holders.alive, "nothing stays behind"


@pytest.mark.parametrize("do", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.fault)])
def test_a_job_on_one_node_goes_on_from_another_ones_memory(run: Callable[..., Watched], do: str) -> None:
    """The job has no rank on the node that keeps its copies; its own is gone with all that it had."""
    job_run, job = _started(run, ONE_NODE)
    copied = wait_copied(job_run, 1)
    assert (copied.nodes, copied.lacking) == (("a", "b"), None)
    strike_node(job_run, "a", do)
    ended = job_run.wait(Ended)
    assert (ended.outcome, ended.dead[0].node) == (Outcome.LOST, "a")
    assert ended.snapshot.startswith("memory:")
    assert ended.snapshot_step > job_run.keeper.newest[1], "newer than what is on disk"
    started = goes_on(job_run, job, ended.snapshot, ("tp=1,pp=1,dp=3", "b1 b2 b3"))
    assert (started.resumed_step, started.fell_back) == (ended.snapshot_step, None)


def test_where_there_is_no_other_node_it_is_said_and_a_rank_may_die(
    run: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = spec(memory_copy_every_steps=5)
    job_run = run(job)
    monkeypatch.setattr(job_run.copies._processes.rooms, "avoided", lambda: {"b"})
    job_run.start(plan(*ONE_NODE, job), 1).result(60)
    copied = wait_copied(job_run, 6)
    why = "all copies lie on a: there is no other node that is up and may keep them"
    assert (copied.nodes, copied.lacking, job_run.copies.error) == (("a",), why, why)
    assert [event.why for event in job_run.events if isinstance(event, Uncopied)] == [why], "once"
    os.kill(job_run.pid("a1"), signal.SIGKILL)
    ended = job_run.wait(Ended)
    started = goes_on(job_run, job, ended.snapshot, ("tp=1,pp=1,dp=2", "b0 b1"))
    assert (started.resumed_step, started.fell_back) == (ended.snapshot_step, None)


def test_copies_leave_a_node_that_is_being_emptied(
    run: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not when the next copy is due; and they come back when it may keep some again."""
    job = spec(memory_copy_every_steps=50)
    job_run = run(job)
    rooms = job_run.copies._processes.rooms
    job_run.start(plan(*ONE_NODE, job), 1).result(60)
    first = wait_copied(job_run, 1)
    assert first.nodes == ("a", "b")
    monkeypatch.setattr(rooms, "avoided", lambda: {"b"})
    second = wait_copied(job_run, first.step + 1)
    assert second.nodes == ("a",)
    monkeypatch.setattr(rooms, "avoided", tuple)
    assert wait_copied(job_run, second.step + 1, timeout_s=60).nodes == ("a", "b")
    deadline = time.monotonic() + 10
    while (held := rooms.held_bytes())["a"] != held["b"]:  # until a's holder has dropped the set before
        assert time.monotonic() < deadline, held


def test_where_there_is_no_room_no_copy_is_made_and_training_goes_on(
    run: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits is known before: each node needs twice what `own_bytes` and its neighbour's copies take."""
    job = spec(memory_copy_every_steps=5)
    job_run = run(job)
    rooms = job_run.copies._processes.rooms
    needed = {node: 2 * num for node, num in with_copies(own_bytes(JobShape.of(job), plan(*WIDE, job))).items()}
    memory = {node: NodeMemory(1 << 40, 1 << 39, num) for node, num in needed.items()}
    short = {**memory, "b": NodeMemory(1 << 40, 1 << 39, needed["b"] - 1)}
    monkeypatch.setattr(rooms, "_memory", lambda: {**short, "a": NodeMemory(1 << 40, 1 << 39, 1000)})
    job_run.start(plan(*WIDE, job), 1).result(60)
    refused = job_run.wait(Uncopied)
    assert refused.why.startswith("no copy is made: a has room for 1000 B of this job's copies, which need ")
    job_run.wait_steps(12)
    assert not any(isinstance(event, Copied) for event in job_run.events)
    assert rooms.held_bytes() == {}
    monkeypatch.setattr(rooms, "_memory", lambda: short)
    lacking = wait_copied(job_run, 1).lacking
    assert lacking is not None
    assert lacking.startswith("what lies on a alone has no second copy: b has room for ")
    monkeypatch.setattr(rooms, "_memory", lambda: memory)
    whole = wait_copied(job_run, job_run.step + 6)
    assert (whole.nodes, whole.lacking) == (("a", "b"), None)


def test_ranks_that_are_refused_memory_leave_the_last_copy_as_it_was(
    run: Callable[..., Watched], tmp_path: Path
) -> None:
    job_run, job = _started(run, ONE_NODE)
    (tmp_path / "available").write_text("1000")
    told = job_run.wait(Uncopied)
    before = job_run.copies.newest
    assert before is not None
    job_run.wait_steps(12)
    assert job_run.copies.newest == before
    assert "MemoryError: a copy of" in told.why
    (tmp_path / "available").unlink()
    strike_node(job_run, "a", "SIGKILL")
    ended = job_run.wait(Ended)
    assert ended.snapshot == f"memory:{before[0]}/{before[1]}"
    started = goes_on(job_run, job, ended.snapshot, ("tp=1,pp=1,dp=2", "b0 b1"))
    assert (started.resumed_step, started.fell_back) == (ended.snapshot_step, None)


@pytest.mark.fault
@pytest.mark.parametrize("when", ["before", "after"])
def test_without_its_copies_the_job_goes_back_to_the_disk(run: Callable[..., Watched], when: str) -> None:
    """The holders die with the rank, or between the loss and the new start."""
    job_run, job = _started(run, WIDE)
    holders = job_run.copies.pids("a") + job_run.copies.pids("b")
    rank = job_run.pid("a1")
    for pid in (*holders, rank) if when == "before" else (rank,):
        os.kill(pid, signal.SIGKILL)
    ended = job_run.wait(Ended)
    assert ended.outcome == Outcome.LOST
    path, step = job_run.keeper.newest
    if when == "after":
        assert ended.snapshot.startswith("memory:")
        for pid in holders:
            os.kill(pid, signal.SIGKILL)
    else:
        assert (ended.snapshot, ended.snapshot_step) == (path, step)
    started = goes_on(job_run, job, ended.snapshot, ("tp=1,pp=1,dp=2", "a0 b0"))
    assert started.resumed_step == step
    assert (started.fell_back is not None) == (when == "after")


@pytest.mark.fault
def test_holders_that_give_nothing_cost_the_copies_not_the_job(run: Callable[..., Watched]) -> None:
    """They answer the coordinator, and no rank: cut off from them, all ranks take the disk's state together."""
    job_run, job = _started(run, WIDE)
    saved = job_run.keeper.newest[1]
    os.kill(job_run.pid("a1"), signal.SIGKILL)
    ended = job_run.wait(Ended)
    order = job_run.copies.recall_order

    def astray(one: Any) -> dict[str, Any]:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            port = closed.getsockname()[1]
        said = order(one)
        for holder in (*said["own"].values(), *said["copied"].values()):
            holder["port"] = port if holder["node"] == "b" else holder["port"]
        return said | {"copied": {}}

    job_run.copies.recall_order = astray  # type: ignore[method-assign]
    started = goes_on(job_run, job, ended.snapshot, ("tp=1,pp=1,dp=2", "a0 b0"))
    assert started.resumed_step == saved
    assert "RecallError" in started.fell_back
    assert started.copies is None


@pytest.mark.fault
@pytest.mark.parametrize("do", ["SIGKILL", "SIGSTOP"])
def test_a_holder_that_dies_or_hangs_costs_no_step(run: Callable[..., Watched], do: str) -> None:
    job_run, job = _started(run, WIDE)
    (pid,) = job_run.copies.pids("b")
    os.kill(pid, signal.Signals[do])
    before = job_run.copies.newest
    job_run.wait_steps(20)
    assert not any(isinstance(event, Ended) for event in job_run.events)
    if do == "SIGKILL":  # another one comes
        assert wait_copied(job_run, before[1] + 1)
        assert job_run.copies.pids("b") != [pid]
    os.kill(job_run.pid("a1"), signal.SIGKILL)
    ended = job_run.wait(Ended)
    assert ended.snapshot.startswith("memory:"), "the other node has everything"
    assert ended.snapshot_step >= before[1]
    started = goes_on(job_run, job, ended.snapshot, ("tp=1,pp=1,dp=2", "a0 b0"))
    assert (started.resumed_step, started.fell_back) == (ended.snapshot_step, None)


@pytest.mark.fault
def test_holders_follow_the_job(run: Callable[..., Watched]) -> None:
    """After a move to another node the old copies stay until there are new ones; its holder keeps these too."""
    job_run, job = _started(run, ("tp=2,pp=1,dp=1", "a0 a1"))
    holders = [job_run.copies.pids(node) for node in ("a", "b")]
    job_run.redeploy(plan("tp=2,pp=1,dp=1", "b0 b1", job), 2, USER).result(60)
    moved = job_run.step
    wait_copied(job_run, moved + 1)
    job_run.wait_steps(8)
    assert [job_run.copies.pids(node) for node in ("a", "b")] == holders
    os.kill(job_run.pid("b1"), signal.SIGKILL)
    ended = job_run.wait(Ended)
    assert ended.snapshot.startswith("memory:2/")
    job_run.start(plan("tp=1,pp=1,dp=2", "a0 a1", job), 3, ended.snapshot).result(60)
    assert job_run.wait(Started, generation=3).resumed_step == ended.snapshot_step
    job_run.wait_steps(2)
    last = job_run.preempt().result(60)
    assert_state_is_exact(Path(last.snapshot), job, last.step)
    steps = [event.step for event in job_run.events if isinstance(event, StepDone) and event.generation == 3]
    assert steps == list(range(ended.snapshot_step + 1, last.step + 1))


def test_no_more_than_two_sets_stand_in_memory(run: Callable[..., Watched]) -> None:
    job_run, job = _started(run, WIDE)
    assert job_run.plan is not None
    predicted, seen = with_copies(own_bytes(JobShape.of(job), job_run.plan)), {"a": 0, "b": 0}
    until = wait_copied(job_run, job_run.step + 1).step + 20
    while job_run.step < until:
        job_run.command(job_run.copies.holders.doubt).result(10)
        job_run.command(job_run.copies.holders.listen).result(10)
        for holder in list(job_run.copies.holders.alive.values()):
            seen[holder.node] = max(seen[holder.node], holder.num_bytes)
    for node, most in seen.items():
        assert predicted[node] <= most <= 2 * predicted[node]


def test_copies_in_memory_are_asked_for_in_the_job_file(run: Callable[..., Watched]) -> None:
    job = spec(steps=30)
    job_run = run(job)
    job_run.start(plan("tp=2,pp=1,dp=1", "a0 a1", job), 1).result(60)
    assert job_run.wait(Ended).outcome == Outcome.FINISHED
    assert not any(isinstance(event, Copied) for event in job_run.events)
