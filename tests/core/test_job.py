"""Job files are refused with field, value and fix; states change only along the table."""

from __future__ import annotations

from typing import Any

import pytest

from suika.core.decision import Reason, ReasonCode
from suika.core.errors import SpecError
from suika.core.job import ENDED, TRANSITIONS, IllegalTransitionError, Job, JobSpec, JobState, parse_job
from suika.core.layout import Layout
from suika.core.presets import PRESETS

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
    assert spec.devices.requested is None
    assert parse_job({**GOOD, "devices": {"min": 1, "max": 8, "requested": 4}}).devices.requested == 4


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
        ({"devices": {"min": 2, "max": 8, "requested": 1}}, r"requested\(1\) is outside min\(2\)..max\(8\)"),
        ({"devices": {"max": 8, "requested": 9}}, "requested"),
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


def test_a_model_may_be_a_preset_and_differ_from_it() -> None:
    assert parse_job({**GOOD, "model": "LLaMA2 7B"}).model == PRESETS["llama2-7b"]
    for name, model in PRESETS.items():
        small = parse_job({**GOOD, "sequence_length": 16, "model": name})
        assert small.model == model
        assert parse_job(small.model_dump(mode="json")) == small
    changed = parse_job(
        {**GOOD, "model": {"preset": "llama2-7b", "hidden": 512, "heads": 8, "lora": {"rank": 4}}}
    ).model
    assert (changed.name, changed.layers, changed.kv_heads, changed.head_dim) == ("llama2-7b changed", 32, 8, 64)
    assert changed.lora is not None
    assert parse_job({**GOOD, "model": {"preset": "llama3-8b", "layers": 2}}).model.kv_heads == 8


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("llama7b", "did you mean llama2-7b"),
        ({"preset": None}, "no preset of this name"),
        ({"preset": "llama2-7b", "layer": 3}, "unknown keys"),
        ({"preset": "llama2-7b", "layers": 0}, "must be a whole number >= 1"),
        ([], "must be a mapping or the name of a preset"),
    ],
)
def test_a_wrong_preset_is_named(model: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_job({**GOOD, "model": model})


def test_a_mistyped_key_is_named_beside_the_one_that_is_missing() -> None:
    mistyped = {("globl_batch" if key == "global_batch" else key): value for key, value in GOOD.items()}
    with pytest.raises(SpecError, match="job.global_batch.*is missing.*'globl_batch'"):
        parse_job(mistyped)
    with pytest.raises(SpecError, match="job.data.*is missing") as caught:
        parse_job({key: value for key, value in GOOD.items() if key != "data"})
    assert "llama" not in str(caught.value), "not the whole file"


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


GANG = {"name": "gang", "command": ["python", "train.py"], "devices": {"min": 4, "max": 4}}


def test_a_command_says_only_its_own_fields_and_comes_back_as_it_went() -> None:
    environment = {"venv": "/opt/x", "variables": {"B": "2", "A": "1"}, "setup": ["make"], "workdir": "/data"}
    spec = parse_job(GANG | {"environment": environment, "preemption": {"signal": "SIGUSR1", "grace_s": 5}})
    assert spec.rigid
    written = spec.model_dump(mode="json")
    assert not set(written) & {"model", "data", "global_batch", "layout", "optimizer"}
    assert written["environment"]["variables"] == {"A": "1", "B": "2"}
    assert parse_job(written) == spec == parse_job(spec.model_dump(mode="python"))
    assert hash(spec) == hash(parse_job(written))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": "gpt2"}, "job.model"),
        ({"steps": 5}, "job.steps"),
        ({"final_checkpoint": "/x"}, "job.final_checkpoint"),
        ({"devices": {"min": 2, "max": 4}}, "job.devices"),
        ({"command": "python train.py"}, "job.command"),
        ({"command": ["", "x"]}, "job.command"),
        ({"command": ["x\0"]}, "job.command"),
        ({"command": ["\ud800"]}, "job.command"),
        ({"command": ["x"] * 5000}, "job.command"),
        ({"environment": {"variables": {"RANK": "0"}}}, "job.environment.variables"),
        ({"environment": {"variables": {"SUIKA_RESTART": "0"}}}, "job.environment.variables"),
        ({"environment": {"variables": {"A=B": "0"}}}, "job.environment.variables"),
        ({"environment": {"variables": {"A": 1}}}, "job.environment.variables"),
        ({"environment": {"variables": [["A", "1"]]}}, "job.environment.variables"),
        ({"environment": {"workdir": "data"}}, "job.environment.workdir"),
        ({"environment": {"venv": "/opt/../etc"}}, "job.environment.venv"),
        ({"environment": {"venv": "/a", "container": ["podman", "run", "x"]}}, "job.environment"),
        ({"preemption": {"policy": "snapshot"}}, "job.preemption.policy"),
        ({"preemption": {"signal": "SIGKILL"}}, "job.preemption.signal"),
        ({"preemption": {"grace_s": -1}}, "job.preemption.grace_s"),
        ({"max_restarts": -1}, "job.max_restarts"),
        ({"expected_s": float("inf")}, "job.expected_s"),
    ],
)
def test_what_no_command_may_say(changes: dict[str, object], field: str) -> None:
    with pytest.raises(SpecError) as refusal:
        parse_job(GANG | changes)
    assert refusal.value.field == field
