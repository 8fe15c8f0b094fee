"""One rank of a rigid job: starts the job's command, passes the signal on, and leaves nothing of it behind.

It stands between the fork server and the user's program: it answers the coordinator, gives the program the environment
variables of torchrun, and when the program ends, ends whatever it started too. No torch, no shell.

Said: `place` (host, port), `set-up`, `running`, `exited` (code; a signal's as -number), `no-start` (error, code).
Obeyed: `setup`, `start`, `signal`, `ping`, `exit`.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import selectors
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from suika.core.environment import ENV_ITEM, Environment
from suika.runtime.forkserver import adopt_orphans, children, die_with_parent
from suika.runtime.gang import NOT_STARTED
from suika.runtime.messages import Channel, DisconnectedError, Message

HOST = "127.0.0.1"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_END_WAIT_S = 5.0
_TAIL_BYTES = 2000  # of what a set-up command printed: its failure is told with that
_LOOK_EVERY_S = 3.0  # for orphans of the program that have ended: nobody else collects them
_SIOCGIFADDR = 0x8915
NOT_FOUND = 127  # exit code, as shells have it


def main(channel: Channel, launch: Mapping[str, Any]) -> None:
    """Entry of the rank's process, called in the fork."""
    os.set_blocking(channel.fileno(), False)
    adopt_orphans()
    try:
        Shepherd(channel, launch).run()
    except DisconnectedError:
        pass  # the fork server is gone
    finally:
        end_children()


class Shepherd:
    """Waits for two things: what the coordinator says, and the end of the program."""

    def __init__(self, channel: Channel, launch: Mapping[str, Any]) -> None:
        self._channel = channel
        self._job_id, self._generation = launch["job_id"], launch["generation"]
        self._command: Sequence[str] = launch["command"]
        self._environment = Environment.model_validate(launch["environment"])
        self._visible: str = launch.get("visible", "")  # variable that names the devices a process may use
        self._port = _reserve(launch.get("address") or HOST)
        self._interface = interface_of(launch.get("address") or "")
        self._child: subprocess.Popen[bytes] | None = None
        self._what = ""  # is running: set-up or command
        self._tail = b""  # what a set-up command printed last
        self._kill_at_s: float | None = None  # the grace ends
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        self._selector.register(self._channel, selectors.EVENT_READ, None)
        host, port = self._port.getsockname()[:2]
        self._say("place", host=host, port=port)
        while True:
            left_s = _LOOK_EVERY_S if self._kill_at_s is None else self._kill_at_s - time.monotonic()
            for key, _ in self._selector.select(min(max(left_s, 0.0), _LOOK_EVERY_S)):
                if key.data is not None and key.fd in self._selector.get_map():  # not ended in this very round
                    key.data(key.fd)
            if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
                self._kill_at_s = None
                end_children(collect=False)
            for message in self._channel.arrived():
                if message["do"] == "exit":
                    return
                self._obey(message)
            self._channel.flush()
            self._collect_orphans()

    def _collect_orphans(self) -> None:
        """What the program left to itself is our child; ended, it would stay a zombie until the program ends."""
        for pid in children():
            if self._child is None or pid != self._child.pid:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _obey(self, message: Message) -> None:
        match message["do"]:
            case "ping":
                self._channel.post({"say": "pong", "job_id": self._job_id, "generation": 0})
            case "setup":
                self._start("set-up", self._environment.setup, message["variables"])
            case "start":
                self._start("command", self._command, message["variables"])
            case "signal" if self._child is not None and self._kill_at_s is None:
                self._kill_at_s = time.monotonic() + message["grace_s"]
                with suppress(ProcessLookupError):  # its first process alone: it knows what to do with the others
                    os.kill(self._child.pid, signal.Signals[message["signal"]])

    def _start(self, what: str, command: Sequence[str], given: Mapping[str, str]) -> None:
        inside = self._environment
        variables = {**base_variables(inside), **dict(inside.variables), **given}
        if self._visible:
            variables.setdefault(self._visible, given["SUIKA_DEVICES"])
            variables.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        if self._interface:  # gloo and NCCL would go by the host's name
            for library in ("GLOO", "NCCL"):
                variables.setdefault(f"{library}_SOCKET_IFNAME", self._interface)
        argv, workdir = command_line(inside, command, variables), inside.workdir or variables["HOME"]
        try:
            _check_places(inside, workdir)
            self._child = subprocess.Popen(
                argv,
                cwd=workdir,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if what == "set-up" else None,
                stderr=subprocess.STDOUT if what == "set-up" else None,
                start_new_session=True,
                preexec_fn=die_with_parent,  # this process has one thread
            )
        except FileNotFoundError as error:
            self._say("no-start", error=f"{error.filename}: {error.strerror}", code=NOT_FOUND)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._say("no-start", error=f"{argv[0]} does not start: {error}", code=NOT_STARTED)
        else:
            self._what = what
            self._selector.register(os.pidfd_open(self._child.pid), selectors.EVENT_READ, self._ended)
            if self._child.stdout is not None:
                self._tail = b""
                os.set_blocking(self._child.stdout.fileno(), False)
                self._selector.register(self._child.stdout, selectors.EVENT_READ, self._pass_on)
            if what == "command":
                self._say("running", step=0)

    def _pass_on(self, output: int) -> bool:
        """Log what a set-up command printed, and keep its last lines. False: there is no more now."""
        try:
            data = os.read(output, 1 << 16)
        except BlockingIOError:
            return False
        os.write(1, data)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if not data:
            self._selector.unregister(output)
        return bool(data)

    def _ended(self, pidfd: int) -> None:
        """The program is over: so is all that it started."""
        self._selector.unregister(pidfd)
        os.close(pidfd)
        child, self._child, self._kill_at_s = self._child, None, None
        assert child is not None
        code = child.wait()
        end_children()
        if child.stdout is not None:
            while child.stdout.fileno() in self._selector.get_map() and self._pass_on(child.stdout.fileno()):
                pass
            with suppress(KeyError):
                self._selector.unregister(child.stdout)
            child.stdout.close()
        if self._what == "command":
            self._say("exited", code=code)
        elif code == 0:
            self._say("set-up")
        else:
            printed = "".join(c if c.isprintable() else " " for c in self._tail.decode(errors="replace")).strip()
            said = f"the set-up command ended with code {code}" + (f": {printed}" if printed else "")
            self._say("no-start", error=said, code=code)

    def _say(self, say: str, **content: Any) -> None:
        self._channel.post({"say": say, "job_id": self._job_id, "generation": self._generation, **content})


def _check_places(environment: Environment, workdir: str) -> None:
    """Popen's own error would not tell a missing folder from a missing program."""
    if not os.path.isdir(workdir):
        raise ValueError(f"the working directory {workdir} is not there")
    if environment.venv is not None and not os.path.isdir(f"{environment.venv}/bin"):
        raise ValueError(f"{environment.venv} is no virtual environment: it has no bin")


def base_variables(environment: Environment) -> dict[str, str]:
    """A clean environment: who and where, nothing of the agent's."""
    try:
        user = pwd.getpwuid(os.getuid())
        who = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
    except KeyError:  # a user without a name
        who = {"HOME": "/"}
    path = _PATH if environment.venv is None else f"{environment.venv}/bin:{_PATH}"
    found = {"PATH": path, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **who}
    return found if environment.venv is None else found | {"VIRTUAL_ENV": environment.venv}


def command_line(environment: Environment, command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The container's start, if there is one, then the command. Values stay out of it: others can read it."""
    start: list[str] = []
    for word in environment.container:
        # Who and where are the container's own.
        own = sorted(set(variables) - {"HOME", "PATH", "USER", "LOGNAME", "SHELL"})
        start += [f"--env={name}" for name in own] if word == ENV_ITEM else [word]
    return [*start, *command]


def end_children(collect: bool = True) -> None:
    """SIGKILL all descendants, those that left their group or session too: they are our children as soon as their
    parents are gone. Without `collect` the direct ones are left to be waited for."""
    deadline = time.monotonic() + _END_WAIT_S
    while (pids := children()) and time.monotonic() < deadline:
        for pid in pids:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
        if not collect:
            return
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _reserve(host: str) -> socket.socket:
    """A port for rank 0's rendezvous. It stays bound but does not listen: whoever binds it with SO_REUSEADDR, as a
    TCPStore does, may have it, and the kernel gives it to nobody else."""
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved
