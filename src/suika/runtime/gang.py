"""The live processes of one job, seen from outside: spawn, tell, hear, and notice death or silence. No torch."""

from __future__ import annotations

import math
import queue
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from suika.core.cluster import Device
from suika.runtime.messages import Message, Processes
from suika.runtime.turns import Wait

RANK_ENTRY = "suika.runtime.worker:main"
STORE_ENTRY = "suika.runtime.store:serve"
HOLDER_ENTRY = "suika.runtime.holder:main"
COMMAND_ENTRY = "suika.runtime.command:main"
NOT_STARTED = 126  # exit code of what could not be started, as shells have it
_PATIENCE = 1.4  # 1.4 x 6 + 8 s, two ticks and the 1 s that an answer may wait for others' are less than 20 s
_TICKS = 6  # looks at the clock within the shorter of the two times that tell silence from death


@dataclass(frozen=True)
class Limits:
    """How long each wait may take. `silent_s` + `answer_s` bounds the noticing of a stopped process (< 20 s)."""

    launch_s: float = 60.0  # a process is up and has joined the store
    build_s: float = 120.0  # groups and program stand, state is loaded
    first_step_s: float = 600.0
    cut_s: float = 600.0  # from the vote to all ranks having stopped: bounded by a step
    move_s: float = 600.0
    save_s: float = 600.0
    end_s: float = 10.0  # a process told to go is gone
    silent_s: float = 6.0  # without a word: ask; if steps are that long, up to `_PATIENCE` times later
    answer_s: float = 8.0  # asked and no answer: taken for dead
    blame_s: float = 1.0  # a rank's error may follow from another's death: wait for the first cause


class DiedError(RuntimeError):
    """A process ended unasked, or stopped answering."""

    def __init__(self, member: Member, how: str, noticed_s: float) -> None:
        super().__init__(f"{member.process} {how}")
        self.member, self.noticed_s = member, noticed_s


class UnableError(RuntimeError):
    """A process says that it cannot do what it was asked. `link`: because it cannot reach another, or state is in two
    halves: a loss, not a failure of the program. `alone`: others wait for it, who have changed nothing."""

    def __init__(self, member: Member, error: str, link: bool, alone: bool = False) -> None:
        super().__init__(f"{member.process}: {error}")
        self.member, self.link, self.alone = member, link, alone


class KilledError(RuntimeError):
    """The owner wants the job ended at once."""


@dataclass(eq=False)
class Member:
    """One process. `said` is its newest message of each (kind, generation)."""

    process: str
    device: Device | None  # None: the store
    heard_s: float
    asked_s: float | None = None  # a ping is unanswered since then
    pid: int | None = None
    going: bool = False  # was told to go: its exit is no accident
    imports: bool = False  # comes up as a program of its own, and can answer nothing before its first word
    code: int | None = None  # exit code once it is gone
    unreachable: bool = False  # it counts as gone because its node is
    said: dict[tuple[str, int], Message] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return self.code is None

    def forget(self, before: int) -> None:
        """Drop what it said in generations before `before`."""
        self.said = {key: message for key, message in self.said.items() if key[1] >= before}


class Gang:
    """Members by process name, one inbox, one `pump`. Used from one thread at a time; `post` may come from any."""

    def __init__(self, job_id: str, processes: Processes, hear: Callable[[Member, Message], None], limits: Limits):
        self.job_id = job_id
        self.members: dict[str, Member] = {}
        self.limits = limits
        self.hear_other: Callable[[Message], None] = lambda event: None  # events of processes that are no members
        self.rest: Callable[[Wait], None] = lambda wait: self.pump(wait.by_s)  # back when it is over, or earlier
        self.on_post: Callable[[], None] = lambda: None  # something is in the inbox; on any thread
        self._processes = processes
        self._hear = hear
        self.stop_by_s = math.inf  # a notice's deadline, of the monotonic clock: no pump sleeps past it
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._next: Message | None = None  # taken out of the inbox, and left for a pump
        # A controller of a thousand jobs has a thousand of these: each look that finds nothing is kept rare.
        self._spread = random.uniform(0.75, 1.0)  # jobs that began together need not all ask at once
        self._silent_s = limits.silent_s * self._spread
        self.tick_s = min(limits.silent_s, limits.answer_s) / _TICKS

    def spawn(
        self,
        process: str,
        node: str,
        device: Device | None,
        entry: str,
        launch: Mapping[str, Any],
        imports: bool = False,
    ) -> Member:
        member = Member(process, device, time.monotonic(), imports=imports)
        self.members[process] = member
        self._processes.spawn(process, node, entry, launch, self.post)
        return member

    def tell(self, members: Iterable[Member], do: str, **content: Any) -> None:
        for member in members:
            self._processes.send(member.process, {"do": do, "job_id": self.job_id, **content})

    def post(self, event: Message) -> None:
        """Put an event into the inbox; an empty one only wakes the pump up. Its arrival is the time that counts: the
        ranks' own clocks are those of several machines."""
        self._inbox.put({**event, "arrived_s": time.monotonic()})
        self.on_post()

    def pump(self, until_s: float = math.inf) -> None:
        """Take in one event, or notice silence; back by `until_s` of the monotonic clock. Raises `DiedError`."""
        event = self._next
        if event is None:
            now = time.monotonic()
            by_s = min(until_s, self.stop_by_s) if self.stop_by_s > now else until_s
            try:
                event = self._inbox.get(timeout=min(self.tick_s, max(by_s - now, 0.0)))
            except queue.Empty:
                self._ask_the_silent()
                return
        self._next = None
        self._take_in(event)
        if not self.has_news:
            self._ask_the_silent()

    @property
    def has_news(self) -> bool:
        """Whether a pump has something to take in."""
        return self._next is not None or not self._inbox.empty()

    def listen(self, takes_no_time: Callable[[Message], bool]) -> bool:
        """Take in what has come, up to the first event that is not one of those that take no time. Returns whether that
        was all. Raises `DiedError` for who has been silent for too long."""
        while self.has_news:
            event, self._next = self._next or self._inbox.get(), None
            if not takes_no_time(event):
                self._next = event
                return False
            self._take_in(event)
        self._ask_the_silent()
        return True

    def _take_in(self, event: Message) -> None:
        member = self.members.get(event.get("process", ""))
        if member is None:
            self.hear_other(event)
            return
        now = time.monotonic()
        silent_s, member.heard_s, member.asked_s = now - member.heard_s, now, None
        match event["event"]:
            case "forked":
                member.pid = event["pid"]
            case "message":
                message = {**event["message"], "at_s": event["arrived_s"]}
                member.said[message["say"], message.get("generation", 0)] = message
                self._hear(member, message)
            case "exit":
                member.code, member.unreachable = event["code"], event.get("unreachable", False)
                del self.members[member.process]
                if not member.going and member.device is not None:  # a lost store hurts only who needs it next
                    raise DiedError(member, _exit_in_words(member.code), silent_s)

    def vouch(self, members: Iterable[Member], took_s: float = 0.0) -> None:
        """A step that none of `members` can be left out of has ended: none is stopped, and none need be asked before
        the next one is overdue, by the `took_s` of this one. In a cluster of thousands of ranks the questions would be
        most of what its controller does."""
        now = time.monotonic()
        patience = min(max(1.0, 1.5 * took_s / self.limits.silent_s), _PATIENCE)
        self._silent_s = self.limits.silent_s * patience * self._spread
        for member in members:
            member.heard_s, member.asked_s = now, None

    def drain(self) -> None:
        """Take in what has already happened, without waiting. Raises `DiedError`."""
        while self.has_news:
            self.pump()

    def gather(
        self,
        say: str,
        generation: int,
        members: Iterable[Member],
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
        complaint: str | None = None,
    ) -> list[Message]:
        """Wait until each of `members` has said `say` in `generation`; their messages, in that order.

        Raises `UnableError` when one says `complaint` instead, `DiedError` when a process dies, `TimeoutError`, or
        whatever `check` raises.
        """
        members = list(members)
        deadline = time.monotonic() + timeout_s
        wait = Wait(lambda: all((say, generation) in m.said for m in members), deadline, check, say)
        while missing := [m for m in members if (say, generation) not in m.said]:
            if complaint is not None and any((complaint, generation) in m.said for m in members):
                self.blame(complaint, generation, members)
            check()
            for member in missing:
                if not member.alive:
                    raise DiedError(member, "is gone", 0.0)
            if time.monotonic() > deadline:
                names = ", ".join(m.process for m in missing)
                raise TimeoutError(f"no '{say}' within {timeout_s:.0f} s from {names}")
            self.rest(wait)
        return [m.said[say, generation] for m in members]

    def blame(self, complaint: str, generation: int, members: Iterable[Member]) -> NoReturn:
        """Raise for the earliest complaint; but first wait a moment, since another's death may be behind them all."""
        until_s = time.monotonic() + self.limits.blame_s
        while time.monotonic() < until_s:
            self.pump(until_s)
        said = [(m.said[complaint, generation], m) for m in members if (complaint, generation) in m.said]
        first, member = min(said, key=lambda pair: pair[0]["at_s"])
        raise UnableError(member, first["error"], first.get("link", False), first.get("alone", False))

    def _ask_the_silent(self) -> None:
        """Ping who has been silent for long; who leaves a ping unanswered for too long is stopped, hence dead."""
        now = time.monotonic()
        silent: list[Member] = []
        for member in list(self.members.values()):
            if member.going or (member.imports and not member.said):
                continue
            if member.asked_s is None and now - member.heard_s > self._silent_s:
                silent.append(member)
            elif member.asked_s is not None and self._is_overdue(member, now):
                self._processes.kill(member.process)
                member.going = True  # whoever handles this waits for its exit, as for any other
                if member.device is None:
                    continue  # a store: hurts only who needs it next
                raise DiedError(member, f"did not answer for {self.limits.answer_s:.0f} s", now - member.heard_s)
        if silent:
            for member in silent:
                member.asked_s = now
            self._processes.ping([member.process for member in silent])

    def _is_overdue(self, member: Member, now: float) -> bool:
        """A question or an answer that is held up on its way, as by a controller that is short of time, is no sign of
        death; one that seems lost is asked again."""
        assert member.asked_s is not None
        wait_s = self.limits.answer_s
        if now - member.asked_s <= wait_s:
            return False
        unanswered_s = self._processes.unanswered_s(member.process)
        if unanswered_s == 0 and now - member.asked_s > 3 * wait_s:
            member.asked_s = None
        return unanswered_s > wait_s / 2

    def dismiss(self, members: Iterable[Member]) -> None:
        """Let processes go: told to exit, killed if they have not after `end_s`. Returns when they are gone."""
        members = list(members)
        for member in members:
            member.going = True
        self.tell(members, "exit")
        self._await_exits(members, self.limits.end_s)
        self.kill([m for m in members if m.alive])

    def kill(self, members: Iterable[Member]) -> None:
        """SIGKILL processes and wait for their exits."""
        members = list(members)
        for member in members:
            member.going = True
            self._processes.kill(member.process)
        self._await_exits(members, self.limits.end_s)

    def _await_exits(self, members: list[Member], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(m.alive for m in members) and time.monotonic() < deadline:
            self.pump(deadline)


def _exit_in_words(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended by itself with code {code}"
