"""Jobs are other people's programs: they do not get root by an oversight."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from suika.core.errors import require

AllowRoot = Annotated[
    bool,
    typer.Option(
        "--allow-root", envvar="SUIKA_ALLOW_ROOT", help="Let jobs run as root: in a container of your own, say."
    ),
]


def require_no_root(allowed: bool, fix: str) -> None:
    """Raise `SpecError` if jobs' processes would be root's and nobody has said that they may be."""
    fix += "; where root is nobody to fear, as in a container of your own: --allow-root or SUIKA_ALLOW_ROOT=1"
    require(allowed or os.geteuid() != 0, "user", "root", "would run the commands of every tenant's jobs", fix)
