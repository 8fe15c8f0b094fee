"""What a simulation comes to: one flat record of numbers per policy, and a bound that no policy can beat.

Completion times count from submission, over all jobs. Percentiles interpolate linearly.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from suika.simulate.jobs import Record, SimJob
from suika.simulate.world import Outcome, World


def numbers(world: World, outcome: Outcome) -> dict[str, float]:
    """The record of one policy's simulation.

    `avg_slowdown`: completion time / (launch + run time at the requested size). `worst_ftf`: worst finish-time
    fairness, completion time / run time on an equal share (capacity / mean number of jobs during its stay).
    `lost_device_s`: device-seconds held without progress, or whose progress a failure undid.
    `moving_share_max`: largest part of a job's run time spent in moves, among jobs with more than 5.
    """
    records = outcome.records
    jct_s = np.array([record.jct_s for record in records])
    decision_ms = np.array(outcome.decision_cpu_s) * 1e3
    moved = [record.paused_s / record.run_s for record in records if record.num_moves > 5]
    return {
        "jobs": len(records),
        "avg_jct_s": float(jct_s.mean()),
        "p50_jct_s": float(np.percentile(jct_s, 50)),
        "p95_jct_s": float(np.percentile(jct_s, 95)),
        "p99_jct_s": float(np.percentile(jct_s, 99)),
        "max_jct_s": float(jct_s.max()),
        "makespan_s": max(record.end_s or 0.0 for record in records),
        "avg_slowdown": float(np.mean(jct_s / np.array([_asked_s(world, r.job) for r in records]))),
        "worst_ftf": float(np.max(jct_s / _fair_s(world, records))),
        "moves_per_job": sum(record.num_moves for record in records) / len(records),
        "failed_moves": sum(record.failed_moves for record in records),
        "max_moves": max(record.num_moves for record in records),
        "moving_share_max": max(moved, default=0.0),
        "device_hours": sum(record.device_s for record in records) / 3600,
        "lost_device_s": sum(record.paused_device_s + _undone_device_s(record) for record in records),
        "decisions": len(decision_ms),
        "decision_ms_p50": float(np.percentile(decision_ms, 50)),
        "decision_ms_p99": float(np.percentile(decision_ms, 99)),
    }


def _undone_device_s(record: Record) -> float:
    return record.lost_steps * record.job.least_device_s_per_step


def _asked_s(world: World, job: SimJob) -> float:
    return _launch_s(world, job) + job.num_steps * job.step_s_at(job.requested_devices or job.max_devices)


def _launch_s(world: World, job: SimJob) -> float:
    """Seconds to start the job alone on the cluster."""
    return world.move_cost.typical(job.first_view(world.predictor.curve(job)))


def _fair_s(world: World, records: Sequence[Record]) -> np.ndarray:
    """Each job's run time on an equal share of the cluster; a share below its smallest size slows it in proportion."""
    begin = np.array([record.job.submit_s for record in records])
    end = np.array([record.end_s or 0.0 for record in records])
    times = np.concatenate([begin, end])
    change = np.concatenate([np.ones(len(records)), -np.ones(len(records))])
    order = np.argsort(times, kind="stable")
    times, present = times[order], np.cumsum(change[order])
    area = np.concatenate([[0.0], np.cumsum(present[:-1] * np.diff(times))])
    mean_present = (np.interp(end, times, area) - np.interp(begin, times, area)) / np.maximum(end - begin, 1e-9)
    fair = []
    for record, num in zip(records, np.maximum(mean_present, 1.0), strict=True):
        job, share = record.job, world.cluster.num_devices / num
        slower = min(share / job.min_devices, 1.0)
        fair.append(_launch_s(world, job) + job.num_steps * job.step_s_at(int(max(share, job.min_devices))) / slower)
    return np.array(fair)


def lower_bound_avg_jct_s(world: World) -> float:
    """No policy can have a smaller mean completion time.

    The larger of two: every job alone on the cluster at its fastest, launch included; and preemptive shortest remaining
    time first on one server of the whole capacity, each job needing only its least device-seconds, moves free.
    """
    alone = [_launch_s(world, job) + job.num_steps * job.fastest_step_s for job in world.jobs]
    return max(float(np.mean(alone)), _one_server_s(world.jobs, world.cluster.num_devices))


def _one_server_s(jobs: Sequence[SimJob], capacity: int) -> float:
    """Mean completion time of preemptive SRPT on one server."""
    arrivals = sorted((job.submit_s, job.num_steps * job.least_device_s_per_step / capacity) for job in jobs)
    left: list[tuple[float, float]] = []  # (seconds left, submitted)
    now_s, total_s, coming = 0.0, 0.0, 0
    while coming < len(arrivals) or left:
        if not left:
            now_s = max(now_s, arrivals[coming][0])
        while coming < len(arrivals) and arrivals[coming][0] <= now_s:
            submit_s, need_s = arrivals[coming]
            heapq.heappush(left, (need_s, submit_s))
            coming += 1
        need_s, submit_s = heapq.heappop(left)
        until_s = arrivals[coming][0] if coming < len(arrivals) else float("inf")
        if now_s + need_s <= until_s:
            now_s += need_s
            total_s += now_s - submit_s
        else:
            heapq.heappush(left, (need_s - (until_s - now_s), submit_s))
            now_s = until_s
    return total_s / len(arrivals)


def over_seeds(rows: Sequence[Mapping[str, float]]) -> dict[str, object]:
    """Means over seeds, with 95 % confidence intervals of the mean (Student's t) in `ci95` where there are several."""
    means = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
    for key in ("jobs", "decisions", "max_moves"):
        means[key] = max(row[key] for row in rows)
    ci95 = {}
    if len(rows) > 1:
        for key in rows[0]:
            values = np.array([row[key] for row in rows], dtype=float)
            half = float(stats.t.ppf(0.975, len(rows) - 1) * values.std(ddof=1) / np.sqrt(len(rows)))
            mean = float(values.mean())
            ci95[key] = [mean - half, mean + half]
    return {**means, "ci95": ci95}
