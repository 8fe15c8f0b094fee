"""`suika top`: the cluster as it is now, until `q`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from suika.cli.ask import MISTAKE, ask
from suika.cli.extras import need
from suika.cli.output import note


def top(
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 2.0,
) -> None:
    """Watch jobs, devices and moves. Asks the same calls as `ps`, `nodes` and `events`; q ends it."""
    need("top", "server", also=("textual",))
    from suika.cli.top_screen import Top

    if not sys.stdout.isatty():
        note("suika top: needs a terminal; `suika ps` and `suika nodes` print the same once")
        sys.exit(MISTAKE)
    ask("nodes")  # says what is wrong before the screen is taken
    Top(every).run()
