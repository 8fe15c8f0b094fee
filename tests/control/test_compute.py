"""What takes long is computed in a process beside the controller: the same as here, and here when there is none."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from suika.control import compute, frames
from suika.control.compute import ComputeError, ComputeProcess
from suika.control.pricing import EstimatedPricing
from suika.core.cluster import parse_cluster_shorthand
from suika.core.errors import SpecError
from suika.core.job import parse_job
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.core.sample import StepSample
from suika.estimate.calibrate import Calibration
from suika.estimate.knowledge import Known

SPEC = parse_job(
    {
        "name": "a",
        "model": {"family": "llama", "layers": 16, "hidden": 1024, "ffn": 4096, "heads": 16, "vocab": 32000},
        "data": "/data/a.txt",
        "global_batch": 32,
        "sequence_length": 1024,
        "steps": 100,
        "devices": {"min": 1, "max": 8},
    }
)


@pytest.fixture(scope="module")
def process() -> Iterator[ComputeProcess]:
    process = ComputeProcess("suika.control.pricing")
    assert process.is_up(60.0)
    yield process
    process.close()


def test_a_curve_is_the_same_to_the_bit(process: ComputeProcess) -> None:
    """The very same object, in fact: versions count here, where curves are used."""
    cluster = parse_cluster_shorthand("4x8:A800")
    there, here = EstimatedPricing(cluster, compute=process.compute), EstimatedPricing(cluster)
    taught = (Known(Calibration.prior("A800"), Calibration.prior("A800"), pace=1.3),)
    for known in ((), taught):
        assert there.curve(SPEC, known) is here.curve(SPEC, known)
    assert there.curve(SPEC) is not there.curve(SPEC, taught)
    assert process.compute(os.getpid) == process.pid


def test_what_is_learned_is_the_same_to_the_bit(process: ComputeProcess) -> None:
    cluster = parse_cluster_shorthand("4x8:A800")
    there, here = EstimatedPricing(cluster, compute=process.compute), EstimatedPricing(cluster)
    option = here.curve(SPEC).options[-1]
    devices = cluster.nodes[0].devices[: option.num_devices]
    plan = Plan.checked(option.layout, devices, SPEC.model, SPEC.global_batch, SPEC.sequence_length, cluster)
    op_s = {"gemm": 0.08, "attention": 0.02, "dp": 0.01}
    samples = [StepSample("j1", 1, step, rank, 0.12, op_s) for step in (20, 30) for rank in range(option.num_devices)]
    begun = Known.nothing(Calibration.prior("A800"), "j1")
    one, other = (pricing.learnt(SPEC, plan, begun, samples) for pricing in (there, here))
    assert one.to_dict() == other.to_dict() != begun.to_dict()
    assert one.calibration.mean.tobytes() == other.calibration.mean.tobytes()
    assert one.calibration.covariance.tobytes() == other.calibration.covariance.tobytes()
    assert there.curve(SPEC, (one,)) is here.curve(SPEC, (other,))


def test_who_comes_while_it_computes_does_not_wait_for_it(process: ComputeProcess) -> None:
    long = threading.Thread(target=process.compute, args=(time.sleep, 3.0))
    long.start()
    deadline_s = time.monotonic() + 2.0
    while process.compute(os.getpid) != os.getpid():  # until the other one has its turn
        assert time.monotonic() < deadline_s
    assert long.is_alive()
    assert process.compute_there(os.getpid) == process.pid  # this waits for its turn
    long.join()


def test_what_fails_there_fails_here_and_says_how(process: ComputeProcess) -> None:
    with pytest.raises(SpecError, match="tp"):
        process.compute(Layout, tp=0)
    with pytest.raises(ComputeError, match="SpecError"):
        process.compute_there(Layout, tp=0)
    assert process.compute(Layout, tp=2) == Layout(tp=2)


def test_what_cannot_be_sent_leaves_it_as_it_was(process: ComputeProcess) -> None:
    """The cluster beside it must not count as sent."""
    cluster = parse_cluster_shorthand("3x2:A800")
    with pytest.raises(Exception, match="pickle"):
        process.compute(max, cluster, threading.Lock())  # type: ignore[call-overload]
    assert process.compute(tuple, [cluster]) == (cluster,)


def test_another_takes_the_place_of_one_that_died(process: ComputeProcess) -> None:
    pid = process.pid
    os.kill(pid, signal.SIGKILL)
    assert process.compute(os.getpid) == os.getpid()
    assert process.pid != pid
    assert process.is_up(60.0)
    assert process.compute(os.getpid) == process.pid


def test_once_closed_everything_is_computed_here() -> None:
    process = ComputeProcess()
    assert process.is_up(60.0)
    asked = threading.Thread(target=process.compute, args=(time.sleep, 1.0))  # its answer will not come
    asked.start()
    pid = process.pid
    process.close()
    asked.join()
    assert process.compute(os.getpid) == process.compute_there(os.getpid) == os.getpid()
    assert process.pid == pid


def test_a_process_that_cannot_be_begun_anew_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    process = ComputeProcess()
    assert process.is_up(60.0)

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("no process can be begun now")

    first = process.pid
    os.kill(first, signal.SIGKILL)
    with monkeypatch.context() as broken:
        broken.setattr(compute.subprocess, "Popen", refuse)
        for _ in range(2):
            assert process.compute(os.getpid) == process.compute_there(os.getpid) == os.getpid()
    deadline = time.monotonic() + 60
    while process.compute(os.getpid) == os.getpid() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.compute(os.getpid) == process.pid != first
    process.close()


def test_descriptors_above_a_thousand_can_be_waited_for() -> None:
    """`select` cannot; a controller of many connections has them."""
    low, end = os.pipe()
    high = fcntl.fcntl(low, fcntl.F_DUPFD, 1500)
    with os.fdopen(low, "rb"), os.fdopen(high, "rb") as pipe, os.fdopen(end, "wb") as writer:
        assert not frames.ready(pipe, 0.0)
        writer.write(b"x")
        writer.flush()
        assert frames.ready(pipe, 1.0)
