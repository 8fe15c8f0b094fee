"""SIGKILL the controller at random instants under load: training goes on, no accepted job is lost or doubled.

Short form here; the long form (100 kills) is `pytest -m long tests/faults/test_controller_kill.py`.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from controllers import ServedCluster, served
from outages import alive, wait

TENANT, QUOTA = "small", 3  # of the short jobs, and the devices that they may hold together


def torment(cluster: ServedCluster, num_kills: int, num_jobs: int, seed: int) -> dict[str, Any]:
    """Kill and restart the controller `num_kills` times while a client submits `num_jobs`; then check the books."""
    dice = random.Random(seed)
    # First in, first out leaves this one alone: its processes must live through everything.
    cluster.ask("submit", job=cluster.job("steady", 1_000_000, 2, 2), request_id="steady")
    wait(lambda: cluster.rows()["steady"]["state"] == "running", 90, "the steady job to run")
    steady = cluster.rank_pids()
    assert len(steady) == 3  # two ranks and their rendezvous store
    cluster.ask("set_quota", tenant=TENANT, quota={"max": QUOTA})
    accepted: dict[str, str] = {}

    def submit() -> None:
        for number in range(num_jobs):
            body = cluster.job(f"short-{number}", dice.randrange(10, 60), 1, 3, tenant=TENANT)
            answer = cluster.ask("submit", timeout_s=120, job=body, request_id=f"r{number}")
            accepted[body["name"]] = answer["id"]
            time.sleep(dice.uniform(0.0, 1.0) * num_kills / num_jobs)

    client = threading.Thread(target=submit)
    client.start()
    progress = [0]
    for _ in range(num_kills):
        time.sleep(dice.uniform(0.1, 2.0))
        cluster.kill_controller()
        assert cluster.policy != "fifo" or all(alive(pid) for pid in steady)
        time.sleep(dice.uniform(0.0, 0.5))
        cluster.controller = cluster.begin()
        cluster.ask("status")
        # The last second of steps may not have been written; the ranks say again where they are.
        wait(lambda: cluster.rows()["steady"]["steps_done"] >= progress[-1], 60, f"step {progress[-1]} to be known")
        progress.append(cluster.rows()["steady"]["steps_done"])
    client.join(180)
    assert not client.is_alive()
    wait(lambda: all(cluster.rows()[n]["state"] in ("finished", "failed") for n in accepted), 240, "all jobs to end")
    _check_books(cluster, accepted)
    if cluster.policy == "fifo":
        assert all(alive(pid) for pid in steady)
        assert cluster.rows()["steady"]["generation"] == 1
        assert progress == sorted(progress)
    before = cluster.rows()["steady"]["steps_done"]
    wait(lambda: cluster.rows()["steady"]["steps_done"] > before, 60, "the steady job to go on")
    return {"kills": num_kills, "jobs": len(accepted), "progress": progress}


def _check_books(cluster: ServedCluster, accepted: dict[str, str]) -> None:
    """Each accepted job exists once, ended once, well; no generation started twice; no device was ever held twice."""
    rows = cluster.ask("jobs", all=True)
    assert Counter(row["name"] for row in rows) == Counter([*accepted, "steady"])
    assert {row["name"]: row["id"] for row in rows if row["name"] != "steady"} == accepted
    assert [row for row in rows if row["state"] == "failed"] == []
    events: list[dict[str, Any]] = []
    while page := cluster.ask("events", after=events[-1]["seq"] if events else 0):
        events += page
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    for job_id in accepted.values():
        kinds = Counter(event["kind"] for event in events if event["job_id"] == job_id)
        assert (kinds["submitted"], kinds["job-finished"]) == (1, 1)
        starts = [e["data"]["generation"] for e in events if e["job_id"] == job_id and e["kind"] == "job-starting"]
        assert starts == sorted(set(starts))
    # A start in progress is begun anew; nothing that ran was ever lost.
    lost = [event["data"]["error"] for event in events if event["kind"] == "recovering"]
    assert [error for error in lost if "was starting when" not in error] == []
    faults = [event["data"] for event in events if event["kind"] == "controller-fault"]
    assert faults == []
    assert _most_devices(events, set(accepted.values())) <= QUOTA


def _most_devices(events: list[dict[str, Any]], of: set[str]) -> int:
    """The most devices that the jobs `of` ever held together, by what was decided and what became of it."""
    decided: dict[str, int] = {}
    held: dict[str, int] = {}
    before: dict[str, int] = {}
    most = 0
    for event in events:
        job_id, kind = event["job_id"], event["kind"]
        if job_id not in of:
            continue
        if kind == "decided" and event["data"]["devices"]:
            decided[job_id] = len(event["data"]["devices"])
        elif kind in ("job-starting", "job-redeploying"):
            before[job_id], held[job_id] = held.get(job_id, 0), decided[job_id]
        elif kind == "move-failed":
            held[job_id] = before[job_id]
        elif kind in ("job-queued", "job-recovering", "job-finished", "job-failed"):
            held.pop(job_id, None)
        most = max(most, sum(held.values()))
    return most


@pytest.mark.fault
@pytest.mark.timeout(420)
@pytest.mark.parametrize("policy", ["fifo", "suika"])  # suika: kills fall into moves and preemptions too
def test_killed_at_random_instants(tmp_path: Path, policy: str) -> None:
    with served(tmp_path, policy=policy) as cluster:
        torment(cluster, num_kills=4, num_jobs=5, seed=1)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("policy", "seed"), [("fifo", 2), ("suika", 3), ("fifo", 4), ("suika", 5)])
def test_killed_a_hundred_times(tmp_path: Path, policy: str, seed: int) -> None:
    with served(tmp_path, policy=policy) as cluster:
        print(torment(cluster, num_kills=25, num_jobs=30, seed=seed))


@pytest.mark.fault
@pytest.mark.timeout(240)
def test_a_cancel_during_an_outage_takes_effect_once(tmp_path: Path) -> None:
    """Sent while nobody answers, and the controller dies again with its answer on the way: the job never comes back."""
    with served(tmp_path, policy="fifo", nodes=1) as cluster:
        cluster.ask("submit", job=cluster.job("doomed", 1_000_000, 2, 2))
        wait(lambda: cluster.rows()["doomed"]["state"] == "running", 90, "the job to run")
        ranks = cluster.rank_pids()
        cluster.kill_controller()
        answers: list[dict[str, Any]] = []
        client = threading.Thread(target=lambda: answers.append(cluster.ask("cancel", timeout_s=120, job="doomed")))
        client.start()
        time.sleep(1.0)
        assert all(alive(pid) for pid in ranks)  # a lost controller harms no job
        cluster.controller = cluster.begin()
        client.join(120)
        assert answers[0]["state"] == "cancelled"
        cluster.kill_controller()
        cluster.controller = cluster.begin()
        cluster.ask("status")
        wait(lambda: not any(alive(pid) for pid in ranks), 60, "its processes to end")
        assert cluster.rows()["doomed"]["state"] == "cancelled"
        kinds = Counter(event["kind"] for event in cluster.ask("events", limit=100_000))
        assert (kinds["job-cancelled"], kinds["job-starting"], kinds["controller-fault"]) == (1, 1, 0)
        again = cluster.ask("submit", job=cluster.job("next", 40, 3, 3))  # the devices are free
        wait(lambda: cluster.rows()["next"]["state"] == "finished", 90, f"{again['name']} to end")
