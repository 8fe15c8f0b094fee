"""`suika completion`: a shell's completion of commands and options, as typer has it for whole applications.

bash    eval "$(suika completion bash)"      (in ~/.bashrc)
zsh     eval "$(suika completion zsh)"
fish    suika completion fish | source
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

import typer

VARIABLE = "_SUIKA_COMPLETE"


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish", "powershell"], typer.Argument(help="Whose script.")],
) -> None:
    """Print the script that teaches a shell Suika's commands and options."""
    from typer._completion_shared import get_completion_script

    print(get_completion_script(prog_name="suika", complete_var=VARIABLE, shell=shell))


def answer() -> None:
    """Tell the shell what could come next; the words typed so far are in its variables."""
    from typer.completion import completion_init

    completion_init()
    words = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    typed = words.split()
    sys.argv[0] = "suika"
    application(typed[1] if len(typed) > 1 else "")(prog_name="suika", complete_var=VARIABLE)


def application(name: str) -> typer.Typer:
    """All commands by name, and the one called `name` with its options: the others need not be imported for it."""
    from importlib.util import find_spec

    from suika.cli.app import COMMANDS, load

    whole = typer.Typer(name="suika", add_completion=False)
    for command, (target, line) in COMMANDS.items():
        if command == name:
            found = load(target)
            if found.registered_groups or len(found.registered_commands) > 1 or found.registered_callback:
                whole.add_typer(found, name=command, help=line)
            else:
                whole.command(command, help=line)(found.registered_commands[0].callback)  # type: ignore[type-var]
        elif find_spec(target.partition(":")[0]):
            whole.command(command, help=line)(_nothing)
    return whole


def _nothing() -> None:
    """In the place of a command that is not being completed."""
