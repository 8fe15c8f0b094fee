"""Job files are refused with field, value and fix; states change only along the table."""

from __future__ import annotations

from typing import Any

import pytest

from suika.core.decision import Reason, ReasonCode
from suika.core.errors import SpecError
from suika.core.job import ENDED, TRANSITIONS, IllegalTransitionError, Job, JobSpec, JobState, parse_job
from suika.core.layout import Layout

MODEL = {"family": "llama", "layers": 4, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "vocab": 257}
GOOD: dict[str, Any] = {
    "name": "train-1",
    "model": MODEL,
    "data": "corpus",
    "global_batch": 16,
    "sequence_length": 32,
    "steps": 10,
    "devices": {"min": 1, "max": 8},
}


def test_a_good_file() -> None:
    spec = parse_job({**GOOD, "layout": {"tp": 2, "pp": 2}})
    assert spec.layout == Layout(tp=2, pp=2)
    assert spec.model.kv_heads == 2
    assert JobSpec.model_validate(spec.model_dump()) == spec
    assert JobSpec.model_json_schema()["properties"]["global_batch"]["minimum"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "../etc"}, "job.name"),
        ({"name": "a;rm -rf"}, "job.name"),
        ({"name": "x" * 64}, "1-63"),
        ({"name": ""}, "job.name"),
        ({"tenant": "A b"}, "job.tenant"),
        ({"step": 5}, "known: name"),
        ({"steps": 0}, "job.steps"),
        ({"steps": 1.5}, "job.steps"),
        ({"global_batch": None}, "job.global_batch"),
        ({"devices": {"min": 4, "max": 2}}, r"min\(4\) > max\(2\)"),
        ({"model": {**MODEL, "heads": 7}}, r"hidden\(64\) % heads\(7\)"),
        ({"model": {**MODEL, "wings": 2}}, "wings"),
        ({"model": {"family": "llama"}}, "missing keys"),
        ({"model": {**MODEL, "layers": 0}}, "model.layers"),
        ({"model": {**MODEL, 1: 2, "wings": 2}}, "wings"),
        ({"model": {**MODEL, "head_dim": -2}}, "model.head_dim"),
        ({"model": {**MODEL, "rope_theta": 0}}, "model.rope_theta"),
        ({"layout": {"layers_per_stage": 3}}, "layout.layers_per_stage"),
        ({"layout": {"dp": 10**9}}, "layout.dp"),
        ({"layout": {"tp": 3}}, r"heads\(4\) % tp\(3\)"),
        ({"layout": {"pp": 8}}, r"layers\(4\) < pipeline chunks\(8\)"),
        ({"layout": {"tp": 4, "dp": 4}}, "outside devices"),
        ({"layout": {"micro_batch": 3}}, r"global_batch\(16\) % micro_batch\(3\)"),
        ({"optimizer": {"lr": float("nan")}}, "job.optimizer.lr"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "job.optimizer.betas"),
        ({"precision": "int4"}, "job.precision"),
    ],
)
def test_bad_files_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_job({**GOOD, **change})


@pytest.mark.parametrize("data", [None, [], "text", 7])
def test_a_job_file_is_a_mapping(data: object) -> None:
    with pytest.raises(SpecError, match="mapping"):
        parse_job(data)


def _job() -> Job:
    return Job("j1", parse_job(GOOD), submitted_s=0.0)


def test_every_edge_of_the_table_and_no_other() -> None:
    reason = Reason(ReasonCode.USER, "test")
    for old in JobState:
        for new in JobState:
            job = Job("j", _job().spec, 0.0, state=old)
            if (old, new) in TRANSITIONS:
                assert job.to(new, reason).state is new
            else:
                with pytest.raises(IllegalTransitionError):
                    job.to(new, reason)


def test_ended_states_have_no_way_out_and_every_other_can_be_cancelled() -> None:
    for old, new in TRANSITIONS:
        assert old not in ENDED, (old, new)
    for state in set(JobState) - ENDED:
        assert (state, JobState.CANCELLED) in TRANSITIONS


def test_each_change_is_a_new_version() -> None:
    job = _job()
    started = job.to(JobState.STARTING, Reason(ReasonCode.START, "granted"), generation=1)
    assert (job.version, started.version, started.update(steps_done=3).version) == (0, 1, 2)
