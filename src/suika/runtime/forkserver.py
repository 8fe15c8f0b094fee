"""The fork server: imports torch once, then forks ranks in tens of milliseconds instead of ten seconds.

`python -m suika.runtime.forkserver --socket PATH [--preload MODULE]...`

It is the hub of its machine, and leads its own session: a Ctrl-C does not reach it. Without torch it starts commands
(runtime/command.py) only.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from suika.core.installed import TO_TRAIN, missing
from suika.runtime.descendants import adopt_orphans
from suika.runtime.hub import Hub
from suika.runtime.messages import listen

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before anything imports BLAS: its threads would make forking unsafe

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "suika.runtime.worker",
    "suika.runtime.store",
    "suika.runtime.command",
)
WITHOUT_TORCH = ("suika.runtime.command",)


def run_at(path: Path, preload: Sequence[str], hub_of: Callable[[socket.socket], Hub]) -> None:
    """Lead a session, listen at `path`, import everything once and serve; the socket is gone afterwards."""
    _lead_session()
    listener = listen(path)
    try:
        for module in (*PRELOAD, *preload) if not missing(TO_TRAIN) else WITHOUT_TORCH:
            importlib.import_module(module)
        gc.freeze()  # what was imported stays shared: a child's collections neither scan nor copy it
        hub_of(listener).run()
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def _lead_session() -> None:
    """A session of its own, and a subreaper: orphans of dead children become its children."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    adopt_orphans()


def main() -> None:
    parser = argparse.ArgumentParser(prog="suika.runtime.forkserver")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--preload", action="append", default=[])
    arguments = parser.parse_args()
    run_at(arguments.socket, arguments.preload, Hub)


if __name__ == "__main__":
    main()
