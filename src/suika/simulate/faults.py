"""Failures and stragglers for simulation: read from a file, or nodes' failures drawn from a seeded exponential law.

A file has the columns at_s, node, down_s, and maybe slow. `node` is a node or one device of it (`n0/3`). Without a
number in `slow` it is down for `down_s` seconds; with one, steps of jobs on it take so many times as long meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from suika.core.cluster import Cluster
from suika.core.errors import SpecError, require
from suika.core.words import parse_seconds
from suika.simulate.readers.rows import csv_rows_of, number, optional
from suika.simulate.trace import BadRowError
from suika.simulate.world import Failure, Slowdown

REPAIR_S = 3600.0
COLUMNS = "columns: at_s, node or node/index, down_s, and for stragglers slow"


def faults(text: str, cluster: Cluster, until_s: float, seed: int) -> tuple[Failure | Slowdown, ...]:
    """`text` is a CSV file or a node's mean time between failures, e.g. `720h` or `86400`."""
    path = Path(text)
    if path.suffix == ".csv" or path.is_file():
        return _read(path, cluster)
    mtbf_s = _mean_time_s(text)
    found = []
    for number_, node in enumerate(cluster.nodes):
        rng = np.random.default_rng([seed, 20262, number_])
        at_s = float(rng.exponential(mtbf_s))
        while at_s < until_s:
            found.append(Failure(at_s, node.name, REPAIR_S))
            at_s += REPAIR_S + float(rng.exponential(mtbf_s))
    return tuple(sorted(found, key=lambda f: (f.at_s, f.node)))


def _mean_time_s(text: str) -> float:
    try:
        value = parse_seconds(text, "failures")
    except SpecError:
        value = 0.0
    fix = "write e.g. 720h, or name a CSV file"
    require(value > 0, "failures", text, "is neither a CSV file nor a mean time between failures", fix)
    return value


def _read(path: Path, cluster: Cluster) -> tuple[Failure | Slowdown, ...]:
    try:
        rows = list(csv_rows_of(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise SpecError("failures", str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SpecError("failures", str(path), f"is not text: {error}") from None
    found = []
    for line, row in rows:
        where = f"failures line {line}"
        if row is None or "node" not in row:
            raise SpecError(where, row, "does not fit the header", COLUMNS)
        try:
            found.append(_fault(row, where, cluster))
        except BadRowError as error:
            raise SpecError(where, dict(row), str(error), COLUMNS) from None
    _check_apart([fault for fault in found if isinstance(fault, Failure)])
    return tuple(sorted(found, key=lambda fault: (fault.at_s, fault.node, -1 if fault.index is None else fault.index)))


def _fault(row: Mapping[str, str], where: str, cluster: Cluster) -> Failure | Slowdown:
    name, slash, number_ = row["node"].partition("/")
    require(name in cluster.node_of, where, row["node"], "no such node in the cluster")
    size = cluster.node_of[name].num_devices
    inside = not slash or (number_.isdecimal() and int(number_) < size)
    require(inside, where, row["node"], f"node {name} has devices 0..{size - 1}")
    index = int(number_) if slash else None
    at_s, for_s, times = number(row, "at_s"), number(row, "down_s"), optional(row, "slow")
    require(at_s >= 0, where, at_s, "at_s must be at least 0")
    require(for_s > 0, where, for_s, "down_s must be above 0")
    if not times:
        return Failure(at_s, name, for_s, index)
    require(times >= 1, where, times, "slow must be at least 1: how many times as long steps take")
    return Slowdown(at_s, name, for_s, times, index)


def _check_apart(found: list[Failure]) -> None:
    """A device that is down cannot fail."""
    up_s: dict[tuple[str, int | None], float] = {}
    for failure in sorted(found, key=lambda f: f.at_s):
        inside = [place for place in up_s if place[0] == failure.node]
        touched = [place for place in inside if None in (place[1], failure.index) or place[1] == failure.index]
        again = any(failure.at_s < up_s[place] for place in touched)
        require(not again, "failures", failure.node, f"fails again at {failure.at_s:g} s while it is down")
        up_s[failure.node, failure.index] = failure.at_s + failure.down_s
