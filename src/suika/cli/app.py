"""`suika`: a table of commands, imported only when used, so that help stays fast and light."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

# name -> (module:typer app or function, one line). Order is the order of `suika --help`.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("suika.cli.demo:demo", "Run a local cluster with real jobs that are re-laid out while they train."),
    "submit": ("suika.cli.jobs:submit", "Submit a job file."),
    "ps": ("suika.cli.jobs:ps", "List jobs."),
    "describe": ("suika.cli.jobs:describe", "Show a job: layout, devices, predicted and measured times, moves."),
    "explain": ("suika.cli.jobs:explain", "Why a job has what it has, or why it waits."),
    "logs": ("suika.cli.logs:logs", "Show what a job printed, and follow it."),
    "resize": ("suika.cli.jobs:resize", "Move a running job to another size or layout."),
    "cancel": ("suika.cli.jobs:cancel", "Cancel a job."),
    "nodes": ("suika.cli.cluster:nodes", "List nodes and who holds their devices."),
    "drain": ("suika.cli.cluster:drain", "Move jobs off a node and give it no new work."),
    "undrain": ("suika.cli.cluster:undrain", "Give a drained node work again."),
    "events": ("suika.cli.events:events", "Show what happened lately, or since a time."),
    "top": ("suika.cli.top:top", "Watch the cluster: jobs, devices and moves."),
    "quota": ("suika.cli.quota:quota", "How many devices a tenant's jobs may hold."),
    "usage": ("suika.cli.usage:usage", "Device time, waiting and moves by tenant."),
    "account": ("suika.cli.account:app", "Accounts, their roles and tokens."),
    "store": ("suika.cli.store:app", "Back up and restore the controller's database."),
    "serve": ("suika.cli.serve:serve", "Run the controller of a cluster of agents."),
    "agent": ("suika.cli.agent:agent", "Make this machine a node of a cluster."),
    "plan": ("suika.cli.plan:plan", "Rank the layouts of a model on a cluster."),
    "estimate": ("suika.cli.estimate:estimate", "Predict measured cases and report the errors."),
    "exec": ("suika.cli.exec:exec_", "Run and profile a PyTorch program without changing it."),
    "simulate": ("suika.cli.simulate:simulate", "Replay a trace under any set of policies."),
    "bench": ("suika.cli.bench:bench", "The benchmarks behind docs/numbers.md."),
    "up": ("suika.cli.cluster:up", "Start a cluster on this machine."),
    "down": ("suika.cli.cluster:down", "Stop it."),
    "completion": ("suika.cli.completion:completion", "Print the completion script of a shell."),
}


def load(target: str) -> typer.Typer:
    """The typer app behind `module:name`, where name is an app or a plain function with typer options."""
    import typer

    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name)
    if isinstance(found, typer.Typer):
        return found
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command()(found)
    return single


def help_text() -> str:
    """The page of `suika --help`: only commands whose file is installed."""
    known = {name: line for name, (target, line) in COMMANDS.items() if find_spec(target.partition(":")[0])}
    width = max(map(len, known), default=0)
    rows = "\n".join(f"  {name:{width}}  {line}" for name, line in known.items())
    return (
        "Usage: suika COMMAND [ARGS]...\n\n"
        "  Re-schedules 3D-parallel LLM training jobs in a shared GPU cluster while they run.\n\n"
        f"Commands (suika COMMAND --help says more):\n{rows}\n\n"
        "Options:\n"
        "  --server URL  Ask the controller there ($SUIKA_SERVER); token: $SUIKA_TOKEN or $SUIKA_TOKEN_FILE.\n"
        "  --version     Show the version and exit.\n  -h, --help    Show this page and exit.\n"
    )


def main() -> None:
    """Console entry. A user's mistake is one line on stderr and exit code 2, never a traceback."""
    from suika.core.errors import SpecError

    given = sys.argv[1:]
    if given[:1] == ["--server"] and len(given) > 1:
        os.environ["SUIKA_SERVER"] = given[1]
        given = given[2:]
    name, *rest = given or ["--help"]
    if "_SUIKA_COMPLETE" in os.environ:  # a shell asks what could come next
        from suika.cli.completion import answer

        answer()
    elif name in ("-h", "--help"):
        print(help_text(), end="")
    elif name == "--version":
        print(f"suika {version('suika')}")
    elif name not in COMMANDS:
        print(f"suika: no command '{name}'; `suika --help` lists them", file=sys.stderr)
        sys.exit(2)
    else:
        try:
            load(COMMANDS[name][0])(args=rest, prog_name=f"suika {name}")
        except SpecError as error:
            print(f"suika: {error}", file=sys.stderr)
            sys.exit(2)
        except BrokenPipeError:
            sys.exit(141)
