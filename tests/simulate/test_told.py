"""The simulator's scheduler decides by the estimator's word where it is told so: cold, or after what jobs taught."""

from __future__ import annotations

from dataclasses import replace

from suika.control.pricing import EstimatedPricing
from suika.core.cluster import parse_cluster_shorthand
from suika.core.job import parse_job
from suika.core.snapshot import ScalingCurve
from suika.estimate.calibrate import Calibration
from suika.estimate.knowledge import Known
from suika.plan.curves import known_curve
from suika.reshard.predict import MovePredictor
from suika.reshard.state import JobShape
from suika.schedule.policies import load
from suika.simulate.engine import Engine
from suika.simulate.jobs import SimJob
from suika.simulate.predictor import Predictor
from suika.simulate.world import World

MODEL = {"family": "llama", "layers": 8, "hidden": 256, "ffn": 704, "heads": 8, "vocab": 257}
CLUSTER = parse_cluster_shorthand("2x4:cpu")
SPEC = parse_job(
    {"name": "a", "model": MODEL, "data": "/text", "global_batch": 16, "sequence_length": 128, "steps": 2000}
    | {"precision": "fp32", "devices": {"min": 1, "max": 8}}
)


def known(**log: float) -> tuple[Known, ...]:
    """What a job's samples would have taught: these op classes take exp(log) times as long."""
    calibration = Calibration.prior("cpu", "a")
    for op_class, value in log.items():
        calibration = calibration.observe_class(op_class, value, 0.01)
    return (Known(calibration, Calibration.prior("cpu", "a")),)


def steps_s(true: ScalingCurve, told: ScalingCurve) -> float:
    """When the job ends whose true curve is `true`, if the scheduler believes `told`."""
    job = SimJob("a", 0.0, float(SPEC.steps), true, 1, 8)
    moves = MovePredictor.of({"a": JobShape.of(SPEC)}, CLUSTER)
    world = World(CLUSTER, (job,), moves, predictor=Predictor(told={"a": told}))
    (record,) = Engine(world, load("suika")).run().records
    assert record.end_s is not None
    return record.end_s


def test_what_jobs_taught_is_worth_knowing() -> None:
    """On a machine whose messages cost ten times what the catalog says, the cold estimate spreads the job too far."""
    cold = known_curve(SPEC, CLUSTER)
    calibrated = known_curve(SPEC, CLUSTER, known(dp=3.5, tp=3.5, p2p=3.5))
    layouts = {(o.shape, o.layout) for o in cold.options}
    true = ScalingCurve((*calibrated.options, *_missing(layouts, cold, calibrated)))
    informed, blind = steps_s(true, calibrated), steps_s(true, cold)
    assert informed < blind
    assert [o.step_s for o in calibrated.options] != [o.step_s for o in cold.options]


def _missing(layouts: set, cold: ScalingCurve, calibrated: ScalingCurve) -> list:  # type: ignore[type-arg]
    """Options that only the cold estimate would choose, at a time that is no better than the calibrated choice."""
    best = {o.shape: o.step_s for o in calibrated.options}
    have = {(o.shape, o.layout) for o in calibrated.options}
    return [replace(o, step_s=1.5 * best[o.shape]) for o in cold.options if (o.shape, o.layout) in layouts - have]


def test_the_same_knowledge_gives_the_same_curve_to_both_worlds() -> None:
    """The controller's pricing and the simulator's word are one function: the very same object."""
    taught = known(gemm=0.3, tp=1.0)
    assert EstimatedPricing(CLUSTER).curve(SPEC, taught) is known_curve(SPEC, CLUSTER, taught)
