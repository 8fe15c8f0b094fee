"""Node failures for simulation: read from a file, or drawn from a seeded exponential law."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from suika.core.cluster import Cluster
from suika.core.errors import SpecError, require
from suika.simulate.engine import Failure
from suika.simulate.readers.rows import csv_rows_of, number

REPAIR_S = 3600.0


def failures(text: str, cluster: Cluster, until_s: float, seed: int) -> tuple[Failure, ...]:
    """`text` is a CSV file (at_s, node, down_s) or a node's mean time between failures, e.g. `720h` or `86400`."""
    path = Path(text)
    if path.suffix == ".csv" or path.is_file():
        return _read(path, cluster)
    mtbf_s = _seconds(text)
    found = []
    for number_, node in enumerate(cluster.nodes):
        rng = np.random.default_rng([seed, 20262, number_])
        at_s = float(rng.exponential(mtbf_s))
        while at_s < until_s:
            found.append(Failure(at_s, node.name, REPAIR_S))
            at_s += REPAIR_S + float(rng.exponential(mtbf_s))
    return tuple(sorted(found, key=lambda f: (f.at_s, f.node)))


def _seconds(text: str) -> float:
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}.get(text[-1:], 0.0)
    try:
        value = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise SpecError("failures", text, "neither a CSV file nor a mean time between failures", "write e.g. 720h")
    return value


def _read(path: Path, cluster: Cluster) -> tuple[Failure, ...]:
    try:
        rows = list(csv_rows_of(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise SpecError("failures", str(path), f"cannot be read: {error.strerror}") from None
    found = []
    for line, row in rows:
        where = f"failures line {line}"
        if row is None or "node" not in row:
            raise SpecError(where, row, "does not fit the header", "columns: at_s, node, down_s")
        require(row["node"] in cluster.node_of, where, row["node"], "no such node in the cluster")
        try:
            found.append(Failure(number(row, "at_s"), row["node"], number(row, "down_s")))
        except ValueError as error:
            raise SpecError(where, row, str(error), "columns: at_s, node, down_s") from None
    _check_apart(found)
    return tuple(sorted(found, key=lambda f: (f.at_s, f.node)))


def _check_apart(found: list[Failure]) -> None:
    up_s: dict[str, float] = {}
    for failure in sorted(found, key=lambda f: f.at_s):
        again = failure.at_s < up_s.get(failure.node, 0.0)
        require(not again, "failures", failure.node, f"fails again at {failure.at_s:g} s while it is down")
        up_s[failure.node] = failure.at_s + failure.down_s
