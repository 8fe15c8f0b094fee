"""Scheduling cycles in a process of their own, so that a decision does not keep the door from answering.

A cycle is a pure function of its snapshot. The process is given one, works, and gives back what may be done; whoever
asked waits meanwhile, and what happens in between is decided together in the next cycle. What does not change from one
snapshot to the next (the cluster, scaling curves) is sent once, so that the policy's caches stay warm. While the
process comes up, at first or after it has died or hung, its owner decides itself: the answer is the same.

That process runs `main`: frames (control/frames.py) of pickles on its standard input and output. It ends with its
parent, whose end of the pipe closes.
"""

from __future__ import annotations

import io
import os
import pickle
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from suika.control.frames import Patience, TooLongError, read, receive, send, write
from suika.core.cluster import Cluster
from suika.core.decision import Decision, Reason
from suika.core.policy import Policy
from suika.core.snapshot import JobView, ScalingCurve, Snapshot
from suika.schedule.cycle import Step, run_cycle
from suika.schedule.policies import load

_ANSWER_S = 120.0
_BEHIND = 5  # niceness: on a busy machine who is asked answers first, then it is decided
_UP = b"up"  # the process' first frame
_MOST_KEPT = 8192  # objects that the process remembers; then it forgets all


class Decided(Protocol):
    """What of a `CycleResult` a driver needs."""

    @property
    def steps(self) -> tuple[Step, ...]: ...
    @property
    def rejected(self) -> tuple[tuple[Decision, Reason], ...]: ...
    @property
    def waits(self) -> Mapping[str, Reason]: ...


Decide = Callable[[Snapshot], Decided]


@dataclass(frozen=True)
class Answer:
    steps: tuple[Step, ...]
    rejected: tuple[tuple[Decision, Reason], ...]
    waits: Mapping[str, Reason]


class DecisionError(RuntimeError):
    """The cycle failed, or its process did not answer."""


def decide_here(policy: Policy) -> Decide:
    """Cycles on the caller's own thread."""
    return lambda snapshot: run_cycle(snapshot, policy)


class DecisionProcess:
    """A `Decide`. Used from one thread at a time; `close` ends the process."""

    def __init__(self, policy: str) -> None:
        self._name = policy
        self._policy = load(policy)  # first: an unknown name is the user's mistake
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._kept: dict[int, tuple[int, object]] = {}  # id -> (number, the object: its id is not used again)
        self._is_up = False
        command = [sys.executable, "-c", "from suika.control.decider import main; main()", self._name]
        return subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, close_fds=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __call__(self, snapshot: Snapshot) -> Decided:
        """Raises `DecisionError`."""
        try:
            if self.is_up():
                return self._ask(snapshot)
        except (OSError, EOFError):
            self.close()
            self._process = self._start()
        return run_cycle(snapshot, self._policy)

    def is_up(self, wait_s: float = 0.0) -> bool:
        """Whether the process answers. Raises `OSError` or `EOFError` if it is gone."""
        pipe = self._process.stdout
        assert pipe is not None
        if not self._is_up and select.select([pipe], [], [], wait_s)[0]:
            self._is_up = receive(pipe, Patience(self.pid, _ANSWER_S)) == _UP
        return self._is_up

    def _ask(self, snapshot: Snapshot) -> Answer:
        process, patience = self._process, Patience(self.pid, _ANSWER_S)
        assert process.stdin is not None
        assert process.stdout is not None
        forget = len(self._kept) > _MOST_KEPT
        if forget:
            self._kept = {}
        try:
            send(process.stdin, self._packed(snapshot, forget), patience)
            answer = pickle.loads(receive(process.stdout, patience))
        except TooLongError:
            process.kill()
            raise DecisionError(f"no decision within {_ANSWER_S:.0f} s") from None
        if isinstance(answer, str):
            raise DecisionError(answer)
        assert isinstance(answer, Answer)
        return answer

    def _packed(self, snapshot: Snapshot, forget: bool) -> bytes:
        """(whether to forget, what is new to the process by number, the snapshot) as one pickle."""
        body = io.BytesIO()
        pickler = _Pickler(body, self._kept)
        pickler.dump(snapshot)
        new = pickler.new
        return pickle.dumps((forget, new, body.getvalue()), pickle.HIGHEST_PROTOCOL)

    def close(self) -> None:
        process = self._process
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class _Pickler(pickle.Pickler):
    """Says what the process remembers by its number. `new`: what it does not know yet."""

    def __init__(self, file: BinaryIO, kept: dict[int, tuple[int, object]]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._kept = kept
        self.new: list[tuple[int, object]] = []

    def reducer_override(self, found: Any) -> Any:
        if not _stays(found):
            return NotImplemented
        kept = self._kept.get(id(found))
        if kept is None:
            kept = self._kept[id(found)] = (len(self._kept), found)
            self.new.append(kept)
        return _recall, (kept[0],)


_remembered: dict[int, object] = {}  # in the process that decides: what it was sent, by number


def _recall(number: int) -> object:
    return _remembered[number]


def _stays(found: object) -> bool:
    """Whether it is worth remembering: the next snapshot will hold the same object."""
    if isinstance(found, JobView):
        return not found.devices and found.moving_until_s is None  # a waiting job keeps its view
    return isinstance(found, (Cluster, ScalingCurve))


def serve(policy: Policy, orders: BinaryIO, answers: BinaryIO) -> None:
    """Answer snapshots until the other end closes."""
    while True:
        try:
            forget, new, body = pickle.loads(read(orders))
            if forget:
                _remembered.clear()
            _remembered.update(new)
            write(answers, pickle.dumps(_answer(pickle.loads(body), policy), pickle.HIGHEST_PROTOCOL))
        except (EOFError, BrokenPipeError):
            return  # the owner has ended


def _answer(snapshot: Snapshot, policy: Policy) -> Answer | str:
    """What the cycle decides, or how it failed."""
    try:
        result = run_cycle(snapshot, policy)
        return Answer(result.steps, result.rejected, dict(result.waits))
    except Exception as error:  # the caller's loop logs it and goes on
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def main() -> None:
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing but answers on the pipe
    os.nice(_BEHIND)
    policy = load(sys.argv[1])
    with suppress(BrokenPipeError):
        write(answers, _UP)
    serve(policy, sys.stdin.buffer, answers)
    os._exit(0)  # what could not be written to a closed pipe stays unwritten, without a word
