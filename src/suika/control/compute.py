"""A process beside the controller that computes what takes long, so that the door answers meanwhile.

It is asked for pure functions of what they are given; who asks waits on a pipe, without the interpreter's lock. What
does not change from one question to the next (the cluster, scaling curves) is sent once, so that caches over there stay
warm. While the process comes up, at first or after it has died or hung, its owner computes: the answer is the same.

That process runs `main`: frames (control/frames.py) of pickles on its standard input and output. It ends with its
parent, whose end of the pipe closes.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO, ParamSpec, Protocol, TypeVar, cast

from suika.control.frames import Patience, TooLongError, read, ready, receive, send, write
from suika.core.cluster import Cluster
from suika.core.errors import SpecError
from suika.core.snapshot import JobView, ScalingCurve

P = ParamSpec("P")
T = TypeVar("T")
_Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]  # function, positional and named arguments
_ANSWER_S = 120.0
_BEHIND = 5  # niceness: on a busy machine who is asked answers first, then it is computed
_UP = b"up"  # the process' first frame
_MOST_KEPT = 8192  # objects that the process remembers; then it forgets all


class Compute(Protocol):
    """`function(*given, **named)`, wherever it is computed: pure, and all of it can be pickled."""

    def __call__(self, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T: ...


def compute_here(function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """On the caller's own thread."""
    return function(*given, **named)


class ComputeError(RuntimeError):
    """The function failed, or the process did not answer."""


class _AwayError(RuntimeError):
    """There is no process to ask now."""


class ComputeProcess:
    """Asked one thing at a time, from any thread; `compute` is a `Compute`. `close` ends the process."""

    def __init__(self, *modules: str) -> None:
        """`modules`: what it imports before it says that it is up."""
        self._modules = modules
        self._turn = threading.Lock()
        self._closed = False
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._kept: dict[int, tuple[int, object]] = {}  # id -> (number, the object: its id is not used again)
        self._is_up = False
        command = [sys.executable, "-c", "from suika.control.compute import main; main()", *self._modules]
        return subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, close_fds=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def compute(self, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Computed here if the process is busy with something else, or fails: then it fails here too, and says how."""
        if self._turn.acquire(blocking=False):
            try:
                return self._ask(function, *given, **named)
            except (_AwayError, ComputeError):
                pass
            finally:
                self._turn.release()
        return function(*given, **named)

    def compute_there(self, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Computed here only if there is no process. Raises `ComputeError`."""
        with self._turn, suppress(_AwayError):
            return self._ask(function, *given, **named)
        return function(*given, **named)

    def is_up(self, wait_s: float = 0.0) -> bool:
        """Whether the process answers. Raises `OSError` or `EOFError` if it is gone."""
        pipe = self._process.stdout
        assert pipe is not None
        if pipe.closed:
            raise EOFError("it has ended")
        if not self._is_up and ready(pipe, wait_s):
            self._is_up = receive(pipe, Patience(self.pid, _ANSWER_S)) == _UP
        return self._is_up

    def _ask(self, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Raises `_AwayError` and `ComputeError`."""
        if self._closed:
            raise _AwayError
        try:
            if not self.is_up():
                raise _AwayError
            went_well, answer = self._answer((function, given, named))
        except (OSError, EOFError):
            self._end()
            if not self._closed:
                with suppress(OSError):  # no process can be begun now: the next call tries again
                    self._process = self._start()
            raise _AwayError from None
        except TooLongError:
            self._process.kill()
            raise ComputeError(f"no answer within {_ANSWER_S:.0f} s") from None
        if not went_well:
            raise ComputeError(answer)
        return cast(T, answer)

    def _answer(self, call: _Call) -> tuple[bool, Any]:
        """Whether it went well, and what came out, or how it failed."""
        process, patience = self._process, Patience(self.pid, _ANSWER_S)
        assert process.stdin is not None
        assert process.stdout is not None
        send(process.stdin, self._packed(call), patience)
        answer: tuple[bool, Any] = pickle.loads(receive(process.stdout, patience))
        return answer

    def _packed(self, call: _Call) -> bytes:
        """(whether to forget, what is new to the process by number, the call) as one pickle."""
        forget = len(self._kept) > _MOST_KEPT
        if forget:
            self._kept = {}
        body = io.BytesIO()
        pickler = _Pickler(body, self._kept)
        pickler.dump(call)
        packed = pickle.dumps((forget, list(pickler.new.values()), body.getvalue()), pickle.HIGHEST_PROTOCOL)
        self._kept |= pickler.new
        return packed

    def close(self) -> None:
        """From then on everything is computed here."""
        self._closed = True
        self._process.kill()  # who waits for its answer waits no longer
        with self._turn:
            self._end()

    def _end(self) -> None:
        process = self._process
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class _Pickler(pickle.Pickler):
    """Says what the process remembers by its number. `new`: what it does not know yet, by id."""

    def __init__(self, file: BinaryIO, kept: Mapping[int, tuple[int, object]]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._kept = kept
        self.new: dict[int, tuple[int, object]] = {}

    def reducer_override(self, found: Any) -> Any:
        if not _stays(found):
            return NotImplemented
        known = self._kept.get(id(found)) or self.new.get(id(found))
        if known is None:
            known = self.new[id(found)] = (len(self._kept) + len(self.new), found)
        return _recall, (known[0],)


_remembered: dict[int, object] = {}  # in the process: what it was sent, by number


def _recall(number: int) -> object:
    return _remembered[number]


def _stays(found: object) -> bool:
    """Whether it is worth remembering: the next snapshot will hold the same object."""
    if isinstance(found, JobView):
        return not found.devices and found.moving_until_s is None  # a waiting job keeps its view
    return isinstance(found, (Cluster, ScalingCurve))


def serve(calls: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the other end closes."""
    while True:
        try:
            forget, new, body = pickle.loads(read(calls))
            if forget:
                _remembered.clear()
            _remembered.update(new)
            write(answers, pickle.dumps(_answered(body), pickle.HIGHEST_PROTOCOL))
        except (EOFError, BrokenPipeError):
            return  # the owner has ended


def _answered(body: bytes) -> tuple[bool, Any]:
    try:
        function, given, named = pickle.loads(body)
        return True, function(*given, **named)
    except Exception as error:  # the owner goes on
        if not isinstance(error, SpecError):  # a user's mistake: whoever asked tells them
            traceback.print_exc()
        return False, f"{type(error).__name__}: {error}"


def main() -> None:
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing but answers on the pipe
    os.nice(_BEHIND)
    for module in sys.argv[1:]:
        import_module(module)
    with suppress(BrokenPipeError):
        write(answers, _UP)
    serve(sys.stdin.buffer, answers)
    os._exit(0)  # what could not be written to a closed pipe stays unwritten, without a word
