"""From profiled steps to calibration: steady times out of dirty series, and each class's share of the surprise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from suika.core.layout import Layout, micro_batch_shares
from suika.core.mesh import Mesh
from suika.core.sample import StepSample
from suika.estimate.calibrate import STEP, TERMS, Calibration
from suika.estimate.columns import Array, LayoutColumns
from suika.estimate.factors import OP_CLASSES
from suika.estimate.predict import Setting
from suika.estimate.step import Price, price

OUTLIER = 4.0  # robust standard deviations from the median that a steady step stays within
CLASS_SD = 0.05  # of log(measured class time / its prediction), for the form of the model
SAMPLE_SD = 0.15  # of log(class time) from one sample to the next
SLOW = 1.5  # times the typical seconds of its stage's ranks, beyond which a rank's are a straggler's


@dataclass(frozen=True)
class Steady:
    """Step time of steady training: median, and the robust standard deviation of one step."""

    step_s: float
    spread_s: float
    num_samples: int

    def tokens_per_s(self, global_batch: int, sequence_length: int) -> float:
        """Of the whole job: every token counts once, whatever ranks share it."""
        return global_batch * sequence_length / self.step_s


def steady(samples: Iterable[StepSample]) -> list[StepSample]:
    """Samples of steady training: other kinds (first, move, snapshot, evaluation), times that are no times, and
    outliers (against the median, of either side) are left out."""
    kept = [s for s in samples if s.kind == "steady" and math.isfinite(s.step_s) and s.step_s > 0]
    if len(kept) < 3:
        return kept
    middle = statistics.median(s.step_s for s in kept)
    spread = 1.4826 * statistics.median(abs(s.step_s - middle) for s in kept)
    limit = OUTLIER * max(spread, 0.02 * middle)
    return [s for s in kept if abs(s.step_s - middle) <= limit]


def steady_step(samples: Iterable[StepSample]) -> Steady | None:
    """The steady step time; None without a steady sample."""
    kept = [s.step_s for s in steady(samples)]
    if not kept:
        return None
    middle = statistics.median(kept)
    return Steady(middle, 1.4826 * statistics.median(abs(t - middle) for t in kept), len(kept))


# Class of a sample (what the trainer's spans are called) -> which part of the price it measures.
COMPUTE, TP, CP, EP, DP, UPDATE = "compute", "tp", "cp", "ep", "dp", "optimizer"
_COMMS = {"tp": TP, "cp": CP, "ep": EP, "dp": DP, "ends": DP}
_PART_OF = {"compute": COMPUTE, "pp": COMPUTE, **_COMMS, "reduce": UPDATE, "norm": UPDATE}
_CLASSES = {
    COMPUTE: ("gemm", "low", "attention", "vector", "host", "p2p"),
    TP: ("tp",),
    CP: ("cp",),
    EP: ("ep",),
    DP: ("dp", "network"),
    UPDATE: ("optimizer",),
}
_BY_MICRO_BATCH = (COMPUTE, TP, CP, EP)  # what a rank does once for each of its micro-batches


def measured_parts(samples: Iterable[StepSample], mesh: Mesh, global_batch: int) -> dict[str, float]:
    """Seconds of work per rank and step by part: the median over a rank's samples, the mean over ranks.

    What a slow device takes longer is no property of the layout: a rank that is `SLOW` times as long over a part as the
    ranks of its stage typically are counts as one of them. A rank alone on its stage has nobody to be held against.
    """
    by_rank: dict[int, list[dict[str, float]]] = {}
    for sample in samples:
        parts = dict.fromkeys(_CLASSES, 0.0)
        for name, seconds in sample.op_s.items():
            parts[_PART_OF.get(name, UPDATE)] += seconds
        by_rank.setdefault(sample.rank, []).append(parts)
    ranks = {r: {p: statistics.median(row[p] for row in rows) for p in _CLASSES} for r, rows in by_rank.items()}
    shares = micro_batch_shares(global_batch, mesh.layout.micro_batch, mesh.layout.dp)
    places = {rank: mesh.coordinate(rank) for rank in ranks}
    for stage in {place.pp for place in places.values()}:
        # Micro-batches of each peer: an uneven split of the batch is no slowness.
        peers = {rank: shares[place.dp] for rank, place in places.items() if place.pp == stage}
        for part in _CLASSES:
            load = peers if part in _BY_MICRO_BATCH else dict.fromkeys(peers, 1)
            typical_s = statistics.median_low(ranks[rank][part] / load[rank] for rank in peers)
            for rank in peers:
                if ranks[rank][part] > SLOW * typical_s * load[rank] > 0:
                    ranks[rank][part] = typical_s * load[rank]
    return {part: statistics.fmean(rank[part] for rank in ranks.values()) for part in _CLASSES}


def predicted_parts(s: Setting, columns: LayoutColumns, log: Mapping[str, Array | float]) -> dict[str, Array]:
    """Seconds of work per rank and step by the same parts, averaged over the stages."""
    p: Price = price(s.grid(columns), log)
    return {k: np.atleast_1d(v) for k, v in p.work_parts_s.items()}


def calibrate(calibration: Calibration, s: Setting, layout: Layout, samples: Iterable[StepSample]) -> Calibration:
    """`calibration` after the component times of one layout's samples (the same layout and setting for all)."""
    kept = [sample for sample in steady(samples) if sample.op_s]
    if not kept:
        return calibration
    measured = measured_parts(kept, Mesh(layout), s.global_batch)
    return calibrate_parts(calibration, s, layout, measured, len(kept))


def calibrate_parts(
    calibration: Calibration, s: Setting, layout: Layout, measured: Mapping[str, float], num_samples: int
) -> Calibration:
    """`calibration` after one layout's `measured_parts`, the mean of `num_samples` samples."""
    columns = LayoutColumns.of([layout], s.model)
    sd = math.hypot(CLASS_SD, SAMPLE_SD / math.sqrt(max(num_samples, 1)))
    weight = num_samples
    for part, classes in _CLASSES.items():
        seconds = measured.get(part, 0.0)
        if seconds <= 0:
            continue
        # Row 0: as known; row i: the i-th class of the part moved a little. One price for all.
        rows = {c: np.full(1 + len(classes), value) for c, value in calibration.log_factors.items()}
        for i, c in enumerate(classes, start=1):
            rows[c][i] += STEP
        found = np.broadcast_to(predicted_parts(s, columns, rows)[part], 1 + len(classes))
        predicted = float(found[0])
        if predicted <= 0:
            continue
        slope = np.zeros(len(TERMS))
        slope[[OP_CLASSES.index(c) for c in classes]] = (found[1:] - predicted) / predicted / STEP
        slope[-1] = 1.0
        calibration = calibration.observe(slope, math.log(seconds / predicted), sd, weight)
        weight = 0  # the parts of one sample are one sample
    return calibration
