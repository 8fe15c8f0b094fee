"""`suika`: a table of commands, imported only when used, so that help stays fast and light."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import click

# name -> (module:typer app or function, one line). Order is the order of `suika --help`.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("suika.cli.demo:demo", "Run a local cluster with real jobs that are re-laid out while they train."),
    "submit": ("suika.cli.jobs:submit", "Submit a job file."),
    "ps": ("suika.cli.jobs:ps", "List jobs."),
    "describe": ("suika.cli.jobs:describe", "Show a job: layout, devices, predicted and measured times, moves."),
    "explain": ("suika.cli.jobs:explain", "Why a job has what it has, or why it waits."),
    "resize": ("suika.cli.jobs:resize", "Move a running job to another size or layout."),
    "cancel": ("suika.cli.jobs:cancel", "Cancel a job."),
    "nodes": ("suika.cli.cluster:nodes", "List nodes and who holds their devices."),
    "drain": ("suika.cli.cluster:drain", "Move jobs off a node and give it no new work."),
    "events": ("suika.cli.cluster:events", "Show what happened, oldest first."),
    "plan": ("suika.cli.plan:plan", "Rank the layouts of a model on a cluster."),
    "estimate": ("suika.cli.estimate:estimate", "Predict measured cases and report the errors."),
    "exec": ("suika.cli.exec:exec_", "Run and profile a PyTorch program without changing it."),
    "simulate": ("suika.cli.simulate:simulate", "Replay a trace under any set of policies."),
    "bench": ("suika.cli.bench:bench", "The benchmarks behind docs/numbers.md."),
    "up": ("suika.cli.cluster:up", "Start a cluster on this machine."),
    "down": ("suika.cli.cluster:down", "Stop it."),
}


class _Lazy(click.Command):
    """Stands for a command until it is used."""

    def __init__(self, name: str, target: str, line: str) -> None:
        super().__init__(name, help=line, short_help=line)
        self.target = target

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> click.Context:
        return load(self.target).make_context(info_name, args, parent=parent, **extra)


def load(target: str) -> click.Command:
    """The click command behind `module:name`, where name is a typer app or a plain function with typer options."""
    import typer

    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name)
    if isinstance(found, click.Command):
        return found
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(found)
        found = app
    return typer.main.get_command(found)


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (target, _) in COMMANDS.items() if _exists(target)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return _Lazy(name, *COMMANDS[name]) if name in COMMANDS else None


def _exists(target: str) -> bool:
    return importlib.util.find_spec(target.partition(":")[0]) is not None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="suika")
def app() -> None:
    """Re-schedules 3D-parallel LLM training jobs in a shared GPU cluster while they run."""


def main() -> None:
    """Console entry. A user's mistake is one line on stderr and exit code 2, never a traceback."""
    from suika.core.errors import SpecError

    try:
        app(standalone_mode=True)
    except SpecError as error:
        print(f"suika: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(141)
