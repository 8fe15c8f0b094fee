"""What a command needs beyond the light install: said at once, with the line that installs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from suika.cli.ask import FAILED
from suika.cli.output import note
from suika.core.installed import TO_TRAIN, missing

MODULES = {
    "train": TO_TRAIN,
    "server": (
        *("sqlalchemy", "alembic", "fastapi", "uvicorn", "httpx"),
        *("sse_starlette", "prometheus_client", "websockets"),
    ),
}


def need(command: str, *extras: str, also: Sequence[str] = ()) -> None:
    """Exit with the fix unless the modules of `extras` are installed; `also` those that only this command needs."""
    wanted = [*(module for extra in extras for module in MODULES[extra]), *also]
    lacks = missing(wanted)
    if lacks:
        names = ",".join(extras)
        note(f"suika {command} needs {', '.join(lacks)}: pip install 'suika[{names}]'")
        sys.exit(FAILED)
