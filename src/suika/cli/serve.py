"""`suika serve`: the controller of a cluster of agents, as a service."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from suika.cli.extras import need
from suika.cli.inputs import read_cluster
from suika.cli.output import note
from suika.core.errors import require


def serve(
    cluster: Annotated[str | None, typer.Option(help="Nodes to expect: a YAML file, or NODESxDEVICES:TYPE.")] = None,
    database: Annotated[str | None, typer.Option(help="postgresql://.. ; by default SQLite in $SUIKA_HOME.")] = None,
    policy: Annotated[str, typer.Option(help="The scheduling policy: NAME or NAME:KEY=NUMBER,..")] = "suika",
    host: Annotated[str, typer.Option(help="Where to listen; beyond this machine only with TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: the last one, else a free one.")] = 0,
    cert: Annotated[Path | None, typer.Option(help="TLS certificate chain, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    lease: Annotated[float, typer.Option(min=1, help="Seconds without a sign of life until a node is lost.")] = 60.0,
    data_root: Annotated[
        list[Path] | None, typer.Option(help="Where jobs' data may lie; by default $SUIKA_HOME/shared alone.")
    ] = None,
) -> None:
    """Serve until SIGTERM, which leaves jobs running, or `suika down`, which ends them. State is in $SUIKA_HOME."""
    need("serve", "server")
    from suika.control.client import home
    from suika.control.daemon import Daemon

    expected = read_cluster(cluster).nodes if cluster else ()
    for root in data_root or ():
        require(root.is_dir(), "data-root", str(root), "is not a folder", "make it first")
    daemon = Daemon(home(), expected, database, policy, host, port, cert, key, lease_s=lease, data_roots=data_root)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: daemon.stopped.set())
    with daemon:
        note(f"suika: term {daemon.store.term} at {daemon.url}; tokens in {home()}/*.token")
        daemon.stopped.wait()
        note("ending all jobs" if daemon.ends_jobs else "leaving; jobs train on")
