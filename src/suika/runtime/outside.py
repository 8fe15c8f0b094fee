"""A training job's processes in its user's own environment: a virtual environment, or a container.

What the fork server forked becomes that environment's Python: its process id, its group, its log and the line to its
coordinator stay, and so does everything that watches over it. Only the import of torch, which forked processes share,
is its own: it comes up in seconds, not in tens of milliseconds. No torch in this module.

The environment needs the same version of Suika, with its trainer. A container must hand descriptor 3 on (apptainer,
enroot and bubblewrap do; podman with `--preserve-fds=1`), and share the network, the processes and the memory of its
node (`--network=host --pid=host --ipc=host`), since ranks find each other there.

`python -m suika.runtime.outside --check VERSION` tells on a node, before any rank is begun, whether that is so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from suika.core.environment import Environment
from suika.runtime.command import base_variables, command_line
from suika.runtime.messages import Channel

ENTRY = "suika.runtime.outside:enter"
_LINE = 3  # the descriptor of the line to the coordinator
_LAUNCH = "SUIKA_LAUNCH"


def is_needed(environment: Environment) -> bool:
    """Whether a training job's processes run elsewhere than in the agent's own environment."""
    return environment.venv is not None or bool(environment.container)


def check_command(environment: Environment) -> tuple[str, ...]:
    """What to run on a node to see that the environment can run ranks."""
    return (_python(environment), "-m", __name__, "--check", version("suika"))


def enter(channel: Channel, launch: Mapping[str, Any]) -> None:
    """Entry in the fork: become the environment's Python, which goes on with `launch["entry"]`."""
    environment = Environment.model_validate(launch["environment"])
    variables = {**base_variables(environment), **launch["variables"], _LAUNCH: json.dumps(launch)}
    argv = command_line(environment, [_python(environment), "-m", __name__], variables)
    os.dup2(channel.fileno(), _LINE)
    os.set_inheritable(_LINE, True)
    os.chdir(environment.workdir or variables["HOME"])
    os.execvpe(argv[0], argv, variables)


def _python(environment: Environment) -> str:
    return "python3" if environment.venv is None else f"{environment.venv}/bin/python"


def check(wanted: str) -> None:
    """Leave with a line that says what is missing, if anything is."""
    if (found := version("suika")) != wanted:
        sys.exit(f"{sys.executable} has Suika {found}; the controller has {wanted}: install that")
    if find_spec("torch") is None:
        sys.exit(f"{sys.executable} has no torch: pip install 'suika[train]' there")


def main() -> None:
    parser = argparse.ArgumentParser(prog="suika.runtime.outside")
    parser.add_argument("--check", metavar="VERSION")
    arguments = parser.parse_args()
    if arguments.check is not None:
        check(arguments.check)
        return
    launch = json.loads(os.environ.pop(_LAUNCH))
    os.set_inheritable(_LINE, False)
    module, _, function = launch["entry"].partition(":")
    getattr(importlib.import_module(module), function)(Channel(socket.socket(fileno=_LINE)), launch)


if __name__ == "__main__":
    main()
