"""What a command needs beyond the light install: said at once, with the line that installs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from suika.cli.ask import FAILED
from suika.cli.output import note

MODULES = {
    "train": ("torch", "xxhash"),
    "server": (
        *("sqlalchemy", "alembic", "fastapi", "uvicorn", "httpx"),
        *("sse_starlette", "prometheus_client", "websockets"),
    ),
}


def need(command: str, *extras: str, also: Sequence[str] = ()) -> None:
    """Exit with the fix unless the modules of `extras` are installed; `also` those that only this command needs."""
    wanted = [*(module for extra in extras for module in MODULES[extra]), *also]
    missing = [module for module in wanted if find_spec(module) is None]
    if missing:
        names = ",".join(extras)
        note(f"suika {command} needs {', '.join(missing)}: pip install 'suika[{names}]'")
        sys.exit(FAILED)
