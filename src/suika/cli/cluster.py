"""`suika up | down | nodes | drain`: a cluster on this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from suika.cli.ask import FAILED, MISTAKE, ask
from suika.cli.extras import need
from suika.cli.inputs import read_cluster
from suika.cli.output import Column, JsonOption, OutputOption, emit, emit_document, note
from suika.core.errors import require
from suika.core.words import parse_seconds, size

START_WAIT_S, STOP_WAIT_S = 120.0, 60.0


def _node_state(row: Mapping[str, Any]) -> str:
    if row["drain"]:
        return str(row["drain"]["state"])
    return "away" if all(device["state"] == "down" for device in row["devices"]) else "ready"


NODE_COLUMNS = [
    Column("NODE", lambda row: row["name"]),
    Column("TYPE", lambda row: row["type"]),
    Column("STATE", _node_state),
    Column("DEVICES", lambda row: "  ".join(_device(device) for device in row["devices"])),
    Column("DEADLINE", lambda row: _clock_time((row["drain"] or {}).get("until_s"))),
    Column("COPIES", lambda row: size(row["copies_bytes"]), wide=True),
    Column("AT MOST", lambda row: size(row["copies_limit_bytes"]), wide=True),
    Column("LEFT", lambda row: ", ".join(left["name"] for left in (row["drain"] or {}).get("left", ())) or None),
]


def _clock_time(at_s: float | None) -> str | None:
    return None if at_s is None else time.strftime("%H:%M:%S", time.localtime(at_s))


def _device(device: dict[str, Any]) -> str:
    index = device["device"].rpartition("/")[2]
    jobs = "+".join(device["jobs"])
    slow = f"!{device['slow']:.1f}x" if device.get("slow") else ""  # of an older controller: not said
    state = f"({device['state']})" if jobs and device["state"] != "used" else ""
    return f"{index}:{jobs or device['state']}{state}{slow}"


def up(
    cluster: Annotated[str, typer.Option(help="A YAML file, or NODESxDEVICES:TYPE.")] = "2x4:cpu",
    emulate: Annotated[str | None, typer.Option(help="Devices that do not exist: NODESxDEVICES:TYPE.")] = None,
    speedup: Annotated[float, typer.Option(help="With --emulate: emulated seconds per second, 1 to 60.")] = 1.0,
    times: Annotated[Path | None, typer.Option(help="With --emulate: measured iteration times (CSV).")] = None,
    policy: Annotated[str, typer.Option(help="The scheduling policy: NAME or NAME:KEY=NUMBER,..")] = "suika",
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay; Ctrl-C ends the cluster.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of cluster files and exit.")] = False,
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """Start a cluster on this machine: its devices are processes on the CPU. State lives in $SUIKA_HOME.

    With --emulate there are no processes: jobs are acted out in time that runs faster, by predicted or measured steps.
    """
    from suika.control.client import home
    from suika.control.service import is_up

    if schema:
        from suika.core.cluster_file import ClusterFile

        emit_document(ClusterFile.model_json_schema())
        return
    need("up", *(("server",) if emulate else ("server", "train")))
    parsed = read_cluster(emulate or cluster)
    if is_up(home()):
        note(f"suika: a cluster is up in {home()}; `suika down` ends it")
        sys.exit(MISTAKE)
    if foreground:
        _serve(parsed, policy, _world(emulate, speedup, times))
        return
    log = home() / "controller.log"
    home().mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-m", "suika.cli", "up", "--foreground", "--cluster", cluster, "--policy", policy]
    if emulate is not None:
        command += ["--emulate", emulate, "--speedup", str(speedup), *(("--times", str(times)) if times else ())]
    with log.open("ab") as file:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, close_fds=True
        )
    status = _await_nodes(child, log, len(parsed.nodes))
    if json or output in ("json", "yaml"):
        emit_document(status, "yaml" if output == "yaml" and not json else "json")
    else:
        print(f"{parsed.num_devices} devices are up (pid {status['pid']}, log {log})")


def _await_nodes(child: subprocess.Popen[bytes], log: Any, num_nodes: int) -> dict[str, Any]:
    """The controller's status once all its nodes have joined."""
    from suika.control.client import NoControllerError, call

    deadline = time.monotonic() + START_WAIT_S
    while time.monotonic() < deadline:
        try:
            status = call("status")
            if sum(status["nodes"].values()) == num_nodes:
                return status
        except NoControllerError:
            if child.poll() is not None:
                break
        time.sleep(0.1)
    child.terminate()
    note(f"suika: the cluster did not come up:\n{log.read_text(errors='replace')[-2000:]}")
    sys.exit(FAILED)


def _world(emulate: str | None, speedup: float, times: Path | None) -> Any:
    """The world that the options name; None: the real one."""
    require(emulate is not None or speedup == 1.0, "speedup", speedup, "needs --emulate: real devices have real time")
    if emulate is None:
        return None
    from suika.control.emulation import Emulated

    return Emulated(emulate, speedup, times.absolute() if times else None)


def _serve(cluster: Any, policy: str, world: Any) -> None:
    """Run the cluster in this process until `suika down`, Ctrl-C or SIGTERM."""
    from suika.control.client import home
    from suika.control.local import LocalCluster

    local = LocalCluster(cluster, home(), policy, world)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: local.daemon.stopped.set())
    with local:
        note(f"{cluster.num_devices} devices come up, at {local.daemon.url}; Ctrl-C ends the cluster")
        local.daemon.stopped.wait()
        note("ending all jobs")


def down(output: OutputOption = "table", json: JsonOption = False) -> None:
    """Stop the cluster and every job on it."""
    from suika.control.client import home
    from suika.control.service import is_up

    answer = ask("down")
    deadline = time.monotonic() + STOP_WAIT_S
    while is_up(home()):
        if time.monotonic() > deadline:
            note(f"suika: the controller (pid {answer['pid']}) is still there after {STOP_WAIT_S:.0f} s")
            sys.exit(FAILED)
        time.sleep(0.05)
    if json or output in ("json", "yaml"):
        emit_document(answer, "yaml" if output == "yaml" and not json else "json")
    else:
        ended = ", ".join(answer["jobs_ended"])
        goes_on = f"; stopped {ended}: the next `suika up` goes on with what is not cancelled" if ended else ""
        print("the cluster is down" + goes_on)


def nodes(output: OutputOption = "table", json: JsonOption = False) -> None:
    """List nodes and who holds their devices."""
    rows = ask("nodes")
    emit({"nodes": rows}, rows, NODE_COLUMNS, "json" if json else output)


def drain(
    node: Annotated[str, typer.Argument(help="The node to empty.")],
    undo: Annotated[bool, typer.Option("--undo", help="Give the node work again; as `suika undrain`.")] = False,
    deadline: Annotated[str | None, typer.Option(help="When it must be empty: 90s, 10m, 2h from now.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until it is empty; exit 1 if it is late.")] = False,
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """Move jobs off a node, live, and give it no new work. What could not leave by the deadline is said."""
    deadline_s = None if deadline is None else parse_seconds(deadline, "deadline")
    row = ask("drain", node=node, undo=undo, deadline_s=deadline_s)
    while wait and not undo and row["drain"] is not None and row["drain"]["state"] == "draining":
        time.sleep(0.5)
        row = next(row for row in ask("nodes") if row["name"] == node)
    emit(row, [row], NODE_COLUMNS, "json" if json else output)
    if wait and row["drain"] is not None and row["drain"]["state"] == "late":
        for left in row["drain"]["left"]:
            note(f"suika: {left['name']} is still on {node}: {left['why']}")
        sys.exit(FAILED)


def undrain(
    node: Annotated[str, typer.Argument(help="The node to use again.")],
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """Give a node work again."""
    row = ask("drain", node=node, undo=True)
    emit(row, [row], NODE_COLUMNS, "json" if json else output)
