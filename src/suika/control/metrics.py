"""Prometheus metrics: gauges from the state, counters and histograms as a fold over the append-only events.

Because the events outlive the controller, so do the counters: a restart folds them again from the first.
"""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from suika.control.api import Api
from suika.control.store import Event
from suika.core.job import JobState

Backends = Callable[[], Mapping[str, bool]]  # name -> whether it can bring up processes now
_EVENTS_AT_ONCE = 10_000
_LONG_S = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 72 * 3600)
_SHORT_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """`text` is safe from any thread. Names are a contract with dashboards: they are never changed."""

    media_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, api: Api, backends: Backends = dict) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._last_seq = 0
        self._submitted_s: dict[str, float] = {}  # of jobs that have not started yet, then not ended yet
        self._started: set[str] = set()
        self._at_stake: dict[str, tuple[float, int]] = {}  # job -> (since when unsaved, devices)
        self._registry = registry = CollectorRegistry()
        registry.register(_Gauges(api, backends))
        self._decisions = Counter("suika_decisions", "Adopted decisions", ["action", "reason"], registry=registry)
        self._moves = Counter("suika_redeployments", "Redeployments by result", ["result"], registry=registry)
        self._bytes = Counter("suika_redeploy_bytes", "Bytes moved", ["link"], registry=registry)
        self._lost = Counter(
            "suika_lost_device_seconds", "Devices held without progress that lasted", ["cause"], registry=registry
        )
        self._cycle = Histogram("suika_cycle_duration_seconds", "One decision", registry=registry, buckets=_SHORT_S)
        self._phase = Histogram(
            "suika_redeploy_duration_seconds", "Phases of a move", ["phase"], registry=registry, buckets=_SHORT_S
        )
        self._pause = Histogram("suika_redeploy_pause_seconds", "Training stood", registry=registry, buckets=_SHORT_S)
        self._wait = Histogram("suika_job_wait_seconds", "Submitted to first step", registry=registry, buckets=_LONG_S)
        self._completion = Histogram(
            "suika_job_completion_seconds", "Submitted to finished", registry=registry, buckets=_LONG_S
        )

    def text(self) -> str:
        with self._lock:
            while events := self._api.state.store.events(self._last_seq, limit=_EVENTS_AT_ONCE):
                for event in events:
                    self._fold(event)
                self._last_seq = events[-1].seq
        return generate_latest(self._registry).decode()

    def _fold(self, event: Event) -> None:
        data, job_id = event.data, event.job_id or ""
        match event.kind:
            case "submitted":
                self._submitted_s[job_id] = event.at_s
            case "decided":
                self._decisions.labels(data["action"], data["reason"]).inc()
            case "cycle":
                self._cycle.observe(data["taken_s"])
            case "job-running" if job_id not in self._started:
                self._started.add(job_id)
                self._wait.observe(max(event.at_s - self._submitted_s[job_id], 0.0))
            case "launched":
                self._at_stake[job_id] = (event.at_s, len(data["plan"]["devices"]))
            case "committed" if job_id in self._at_stake:
                self._at_stake[job_id] = (self._at_stake[job_id][0], len(data["plan"]["devices"]))
            case "snapshot" if job_id in self._at_stake:
                self._at_stake[job_id] = (event.at_s, self._at_stake[job_id][1])
            case "job-finished" | "job-failed" | "job-cancelled":
                submitted_s = self._submitted_s.pop(job_id)
                self._started.discard(job_id)
                if event.kind == "job-finished":
                    self._completion.observe(max(event.at_s - submitted_s, 0.0))
            case "redeployed":
                self._fold_move(data)
            case "move-failed":
                self._moves.labels("aborted").inc()
            case "recovering" if job_id in self._at_stake:
                since_s, num_devices = self._at_stake.pop(job_id)
                self._lost.labels("device-lost").inc(max(event.at_s - since_s, 0.0) * num_devices)

    def _fold_move(self, data: Mapping[str, Any]) -> None:
        self._moves.labels("committed").inc()
        for phase, taken_s in data["phase_s"].items():
            self._phase.labels(phase).observe(taken_s)
        self._bytes.labels("network").inc(data["network_bytes"])
        self._bytes.labels("node").inc(max(data["moved_bytes"] - data["network_bytes"], 0))
        if data["pause_s"] is not None:
            pause_s = max(data["pause_s"], 0.0)
            self._pause.observe(pause_s)
            self._lost.labels("move").inc(pause_s * len(data["new_devices"]))


class _Gauges(Collector):
    """What is so now."""

    def __init__(self, api: Api, backends: Backends) -> None:
        self._api = api
        self._backends = backends

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is collected at registration

    def collect(self) -> Iterable[Metric]:
        state = self._api.state
        jobs = GaugeMetricFamily("suika_jobs", "Jobs by state", labels=["state"])
        per_state = Tally(head.state for head in state.store.heads())
        for job_state in JobState:
            jobs.add_metric([job_state], per_state[job_state])
        nodes = self._api.nodes()
        per_device = Tally(device["state"] for node in nodes for device in node["devices"])
        devices = GaugeMetricFamily("suika_devices", "Devices by state", labels=["state"])
        for device_state in ("used", "free", "releasing", "down"):
            devices.add_metric([device_state], per_device[device_state])
        build = GaugeMetricFamily("suika_build_info", "Always 1", labels=["version"])
        build.add_metric([version("suika")], 1)
        errors = GaugeMetricFamily(
            "suika_estimator_relative_error_ratio", "Estimated / measured step time - 1", labels=["job"]
        )
        for job_id, watch in list(state.watches.items()):
            paces = [known.pace for known in state.learned.own(job_id).values() if known.pace is not None]
            if paces and watch.held:
                errors.add_metric([job_id], 1.0 / paces[-1] - 1.0)
        slow = GaugeMetricFamily("suika_slow_devices", "Devices that take longer than their peers in the same job")
        slow.add_metric([], sum(len(watch.stragglers.slow) for watch in list(state.watches.values())))
        copies = GaugeMetricFamily("suika_copies_bytes", "Copies of jobs' state in memory", labels=["node"])
        for node in nodes:
            copies.add_metric([node["name"]], node["copies_bytes"])
        backend = GaugeMetricFamily("suika_backend_up", "1: brings up processes", labels=["backend"])
        for name, is_up in self._backends().items():
            backend.add_metric([name], is_up)
        return (
            *(jobs, devices, build, errors, slow, copies, backend),
            GaugeMetricFamily(
                "suika_fragmentation_ratio",
                "Free devices outside wholly free nodes / free devices",
                _fragmentation(nodes),
            ),
        )


def _fragmentation(nodes: list[dict[str, Any]]) -> float:
    """0: every free device is in a wholly free node (or none is free); 1: no node is wholly free."""
    free = [sum(device["state"] == "free" for device in node["devices"]) for node in nodes]
    scattered = sum(n for n, node in zip(free, nodes, strict=True) if n < len(node["devices"]))
    return scattered / sum(free) if sum(free) else 0.0
