"""The same workload twice: in the simulator, and through the real controller, agents and store on emulated devices.

The jobs are rows of a trace, chosen by run time and taken in order of submission, with arrivals rescaled to `load`.
Both worlds have the same table of measured iteration times, the same ranges, the same policy and the same prices of
launches and moves. The emulated one is `suika up --emulate` in a process of its own, with its store on disk and one
agent process for all nodes; a client submits each job when its time has come. Differences are what the simulator leaves
out: messages, the store's writes, decisions that take their time while the clock runs `speedup` times as fast.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from suika.control.client import NoControllerError, call
from suika.core.cluster import Cluster, parse_cluster_shorthand
from suika.core.errors import require
from suika.schedule.policies import parse_policy
from suika.simulate.engine import Engine
from suika.simulate.jobs import SimJob
from suika.simulate.moves import predicted
from suika.simulate.times import Models, measured
from suika.simulate.trace import Trace, read_trace
from suika.simulate.workload import build
from suika.simulate.world import Outcome, World

_UP_WAIT_S = 120.0
_POLL_S = 1.0


def run(
    jobs: Annotated[Path, typer.Option(help="A trace file.")],
    times: Annotated[Path, typer.Option(help="Measured iteration times (CSV).")],
    cluster: Annotated[str, typer.Option(help="NODESxDEVICES:TYPE.")] = "8x8:A800",
    num_jobs: Annotated[int, typer.Option(help="How many of the trace's jobs.")] = 48,
    run_time: Annotated[str, typer.Option(help="Only jobs whose traced seconds lie in MIN:MAX.")] = "100:3600",
    load: Annotated[float, typer.Option(help="Rescale arrivals to this load.")] = 1.5,
    speedup: Annotated[float, typer.Option(help="Emulated seconds per second, 1 to 60.")] = 60.0,
    policy: Annotated[str, typer.Option(help="The scheduling policy, in both worlds.")] = "suika",
) -> dict[str, Any]:
    """Completion times in simulation against those of the real controller on emulated devices."""
    topology, models = parse_cluster_shorthand(cluster), measured(times)
    chosen = slice_of(read_trace(jobs), num_jobs, run_time)
    workload = build(chosen, topology, models, load=load).jobs
    simulated = simulate(workload, topology, models, policy)
    makespan_s = max(record.end_s or 0.0 for record in simulated.records)
    patience_s = 2.0 * makespan_s / speedup + 60.0
    with (
        tempfile.TemporaryDirectory(prefix="suika-emulate-") as folder,
        emulated(Path(folder), cluster, speedup, times, policy) as home,
    ):
        rows = play(home, workload, models, speedup, patience_s)
    return compare(simulated, rows, policy, speedup)


def slice_of(trace: Trace, num_jobs: int, run_time: str) -> Trace:
    """The first `num_jobs` whose traced run time lies in the range; the first of them submitted at 0."""
    low, _, high = run_time.partition(":")
    try:
        least_s, most_s = float(low), float(high)
    except ValueError:
        least_s, most_s = 1.0, 0.0
    require(0 < least_s < most_s, "run-time", run_time, "is not MIN:MAX in seconds", "write e.g. 100:3600")
    found = [job for job in trace.jobs if least_s <= job.duration_s <= most_s][:num_jobs]
    require(bool(found), "run-time", run_time, "no job of the trace runs that long")
    first_s = found[0].submit_s
    return replace(trace, jobs=tuple(replace(job, submit_s=job.submit_s - first_s) for job in found))


def simulate(jobs: Sequence[SimJob], cluster: Cluster, models: Models, policy: str) -> Outcome:
    cost = predicted(models.shapes, {job.id: job.model for job in jobs}, cluster)
    whole = tuple(replace(job, num_steps=float(_steps(job))) for job in jobs)
    return Engine(World(cluster, whole, cost), parse_policy(policy)).run()


@contextmanager
def emulated(folder: Path, cluster: str, speedup: float, times: Path, policy: str) -> Iterator[Path]:
    """`suika up --emulate` in a process of its own, all its nodes here. Gives its home, which may be there before."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "suika.cli", "up", "--foreground", "--emulate", cluster]
    command += ["--speedup", str(speedup), "--times", str(times), "--policy", policy]
    environment = {**os.environ, "SUIKA_HOME": str(home)}
    with (folder / "controller.log").open("ab") as log:
        server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + _UP_WAIT_S
        while not _all_here(home):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "controller.log").read_text()[-2000:])
            time.sleep(0.1)
        yield home
    finally:
        server.terminate()
        server.wait(60)


def _all_here(home: Path) -> bool:
    try:
        return all(call("status", home / "controller.sock")["nodes"].values())
    except NoControllerError:
        return False


def play(
    home: Path, jobs: Sequence[SimJob], models: Models, speedup: float, patience_s: float
) -> list[Mapping[str, Any]]:
    """Submit each job when its time has come, and wait until all have ended. Rows as `suika ps --all` gives them."""
    socket = home / "controller.sock"
    data = home / "no-data"
    data.write_text("emulated jobs read no data\n" * 1000)
    began_s = time.monotonic()
    for job in sorted(jobs, key=lambda job: job.submit_s):
        time.sleep(max(0.0, began_s + job.submit_s / speedup - time.monotonic()))
        call("submit", socket, job=job_file(job, models, data))
    deadline = time.monotonic() + patience_s
    while True:
        rows = call("jobs", socket, all=True)
        if all(row["ended_s"] is not None for row in rows):
            return rows
        require(time.monotonic() < deadline, "jobs", len(rows), "have not all ended in twice the simulated time")
        time.sleep(_POLL_S)


def job_file(job: SimJob, models: Models, data: Path) -> dict[str, Any]:
    """What a user would submit for the simulated job."""
    shape = models.shapes[job.model]
    model = shape.model
    fields = ("name", "family", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "tied")
    return {
        "name": job.id.lower().replace("_", "-"),
        "model": {name: getattr(model, name) for name in fields},
        "data": str(data),
        "global_batch": shape.global_batch,
        "sequence_length": shape.sequence_length,
        "precision": shape.precision,
        "steps": _steps(job),
        "devices": {"min": job.min_devices, "max": job.max_devices},
        "snapshot_every_steps": 0,
        "tenant": job.tenant,
        "priority": job.priority,
    }


def _steps(job: SimJob) -> int:
    return max(1, round(job.num_steps))


def compare(simulated: Outcome, rows: Sequence[Mapping[str, Any]], policy: str, speedup: float) -> dict[str, Any]:
    jct_s = {record.job.id.lower().replace("_", "-"): record.jct_s for record in simulated.records}
    done = [row for row in rows if row["state"] == "finished"]
    there_s = statistics.mean(jct_s.values())
    here_s = statistics.mean(row["jct_s"] for row in done)
    moves = sum(record.num_moves for record in simulated.records)
    return {
        "policy": policy,
        "speedup": speedup,
        "jobs": len(rows),
        "finished": len(done),
        "avg_jct_s": {"simulated": there_s, "emulated": here_s, "difference": here_s / there_s - 1.0},
        "makespan_s": {
            "simulated": max(record.end_s or 0.0 for record in simulated.records),
            "emulated": max(row["ended_s"] for row in done) - min(row["submitted_s"] for row in rows),
        },
        "moves": {"simulated": moves, "emulated": sum(row["num_moves"] for row in done)},
        "per_job": [
            {"job": row["name"], "simulated_s": jct_s[row["name"]], "emulated_s": row["jct_s"]} for row in done
        ],
    }
