"""A training job's processes in its user's own environment: a virtual environment, or a container.

What the fork server forked becomes that environment's Python: its process id, its group, its log and the line to its
coordinator stay, and so does everything that watches over it. Only the import of torch, which forked processes share,
is its own: it comes up in seconds, not in tens of milliseconds. Before a container it stays, and watches over what the
container's runtime starts (runtime/container.py). No torch in this module.

The environment needs the same version of Suika, with its trainer. A container must hand descriptor 3 on and share its
node's network, since ranks find each other there; process, memory and host names may be its own.

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
from typing import Any

from suika.core.environment import Environment
from suika.core.installed import TO_TRAIN, missing
from suika.runtime import container
from suika.runtime.command import base_variables
from suika.runtime.messages import Channel

ENTRY = "suika.runtime.outside:enter"
_LAUNCH = "SUIKA_LAUNCH"


def is_needed(environment: Environment) -> bool:
    """Whether a training job's processes run elsewhere than in the agent's own environment."""
    return environment.venv is not None or bool(environment.container)


def check_command(environment: Environment) -> tuple[str, ...]:
    """What to run on a node to see that the environment can run ranks."""
    contained = ("--contained",) if environment.container else ()
    return (_python(environment), "-m", __name__, "--check", version("suika"), *contained)


def enter(channel: Channel, launch: Mapping[str, Any]) -> None:
    """Entry in the fork: become the environment's Python, which goes on with `launch["entry"]`."""
    environment = Environment.model_validate(launch["environment"])
    variables = {**base_variables(environment), **launch["variables"], _LAUNCH: json.dumps(launch)}
    folder = environment.workdir or variables["HOME"]
    argv = container.command_line(environment.container, [_python(environment), "-m", __name__], variables)
    if environment.container:
        sys.exit(container.run(argv, variables, folder, channel))
    container.hand_on(channel)
    os.chdir(folder)
    os.execvpe(argv[0], argv, variables)


def _python(environment: Environment) -> str:
    return "python3" if environment.venv is None else f"{environment.venv}/bin/python"


def check(wanted: str, contained: bool) -> None:
    """Leave with a line that says what is missing, if anything is."""
    if contained and (problem := container.line_problem()):
        sys.exit(f"the container {problem}")
    if (found := version("suika")) != wanted:
        sys.exit(f"{sys.executable} has Suika {found}; the controller has {wanted}: install that")
    if lacks := missing(TO_TRAIN):
        sys.exit(f"{sys.executable} has no {', '.join(lacks)}: pip install 'suika[train]' there")


def main() -> None:
    parser = argparse.ArgumentParser(prog="suika.runtime.outside")
    parser.add_argument("--check", metavar="VERSION")
    parser.add_argument("--contained", action="store_true", help="with --check: this runs in a container")
    arguments = parser.parse_args()
    if arguments.check is not None:
        check(arguments.check, arguments.contained)
        return
    launch = json.loads(os.environ.pop(_LAUNCH))
    os.set_inheritable(container.LINE, False)
    module, _, function = launch["entry"].partition(":")
    getattr(importlib.import_module(module), function)(Channel(socket.socket(fileno=container.LINE)), launch)


if __name__ == "__main__":
    main()
