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

from suika.core.environment import Environment
from suika.runtime import container
from suika.runtime.descendants import adopt_orphans, collect_orphans, die_with_parent, end_children, outlive_parent
from suika.runtime.gang import NOT_STARTED
from suika.runtime.messages import Channel, DisconnectedError, Message

HOST = "127.0.0.1"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TAIL_BYTES = 2000  # of what a set-up command printed: its failure is told with that
_SIOCGIFADDR = 0x8915
NOT_FOUND = 127  # exit code, as shells have it


def main(channel: Channel, launch: Mapping[str, Any]) -> None:
    """Entry of the rank's process, called in the fork."""
    os.set_blocking(channel.fileno(), False)
    adopt_orphans()
    outlive_parent()  # the line tells of its end; then there is time to end what left the program's group
    shepherd = Shepherd(channel, launch)
    try:
        shepherd.run()
    except DisconnectedError:
        pass  # the fork server is gone
    finally:
        shepherd.end()


class Shepherd:
    """Waits for two things: what the coordinator says, and the end of the program."""

    def __init__(self, channel: Channel, launch: Mapping[str, Any]) -> None:
        self._channel = channel
        self._job_id, self._generation = launch["job_id"], launch["generation"]
        self._command: Sequence[str] = launch["command"]
        self._environment = Environment.model_validate(launch["environment"])
        self._visible: str = launch.get("visible", "")  # variable that names the devices a process may use
        self._mute, _ = socket.socketpair()  # what containers hand on when they run no rank; nobody speaks there
        self._port = _reserve(launch.get("address") or HOST)
        self._interface = interface_of(launch.get("address") or "")
        self._child: subprocess.Popen[bytes] | None = None
        self._what = ""  # is running: set-up or command
        self._tail = b""  # what a set-up command printed last
        self._kill_at_s: float | None = None  # the grace ends
        self._overdue = self._over = False  # the grace has ended; the fork server wants the end
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        self._selector.register(self._channel, selectors.EVENT_READ, None)
        if self._environment.container:
            self._selector.register(container.end_requests(), selectors.EVENT_READ, self._give_up)
        host, port = self._port.getsockname()[:2]
        self._say("place", host=host, port=port)
        while not self._over:
            left_s = container.LOOK_EVERY_S if self._kill_at_s is None else self._kill_at_s - time.monotonic()
            for key, _ in self._selector.select(min(max(left_s, 0.0), container.LOOK_EVERY_S)):
                if key.data is not None and key.fd in self._selector.get_map():  # not ended in this very round
                    key.data(key.fd)
            if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
                self._kill()
            for message in self._channel.arrived():
                if message["do"] == "exit":
                    return
                self._obey(message)
            self._channel.flush()
            collect_orphans(self._child.pid if self._child is not None else None)

    def end(self) -> None:
        """End whatever is there."""
        container.end() if self._environment.container else end_children()

    def _give_up(self, asked: int) -> None:
        self._over = True

    def _kill(self) -> None:
        """The grace is over. A container's runtime is killed too if it does not end once nothing runs inside."""
        if self._environment.container and not self._overdue and container.kill_inside():
            self._kill_at_s = time.monotonic() + container.TIDY_S
        else:
            self._kill_at_s = None
            end_children(collect=False)
        self._overdue = True

    def _obey(self, message: Message) -> None:
        match message["do"]:
            case "ping":
                self._channel.post({"say": "pong", "job_id": self._job_id, "generation": 0})
            case "setup":
                self._start("set-up", self._environment.setup, message["variables"])
            case "start":
                self._start("command", self._command, message["variables"])
            case "signal" if self._child is not None and self._kill_at_s is None and not self._overdue:
                self._kill_at_s = time.monotonic() + message["grace_s"]
                self._signal(self._child.pid, signal.Signals[message["signal"]])

    def _signal(self, pid: int, number: int) -> None:
        """To its first process alone: that knows what to do with the others."""
        if self._environment.container:
            container.signal_inside(pid, number)
        else:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _start(self, what: str, command: Sequence[str], given: Mapping[str, str]) -> None:
        inside = self._environment
        variables = {**base_variables(inside), **dict(inside.variables), **given}
        if self._visible:
            variables.setdefault(self._visible, given["SUIKA_DEVICES"])
            variables.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        if self._interface:  # gloo and NCCL would go by the host's name
            for library in ("GLOO", "NCCL"):
                variables.setdefault(f"{library}_SOCKET_IFNAME", self._interface)
        argv = container.command_line(inside.container, command, variables)
        workdir = inside.workdir or variables["HOME"]
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
                pass_fds=(container.LINE,) if inside.container else (),
                preexec_fn=self._prepare,  # this process has one thread
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

    def _prepare(self) -> None:
        """In the child, before it executes anything."""
        die_with_parent()
        if self._environment.container:
            container.hand_on(self._mute)

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
        self.end()
        if child.stdout is not None:
            while child.stdout.fileno() in self._selector.get_map() and self._pass_on(child.stdout.fileno()):
                pass
            with suppress(KeyError):
                self._selector.unregister(child.stdout)
            child.stdout.close()
        if self._what == "command":
            self._say("exited", code=-signal.SIGKILL if self._overdue else code)
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
