"""`JobSpec` (what a user writes), `Job` (what became of it) and the one table of state transitions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from suika.core.decision import Reason, ReasonCode
from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.plan import Plan

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
Precision = Literal["fp32", "fp64", "bf16"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class OptimizerSpec(_Strict):
    """AdamW with a decay group (matrices) and a group without (norms, biases), and the learning-rate schedule.

    The learning rate is a function of the step alone: warm-up is linear over `warmup_steps`, then `decay` falls to
    `min_lr_ratio` x lr at `decay_steps` (0: the job's steps).
    """

    lr: Annotated[float, Field(gt=0)] = 1e-3
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Annotated[float, Field(ge=0)] = 1.0  # 0: no clipping
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    decay_steps: Annotated[int, Field(ge=0)] = 0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1


class DeviceRange(_Strict):
    """How many devices the job can use; `type` pins a device type."""

    min: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    max: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    type: str | None = None

    @model_validator(mode="after")
    def _ordered(self) -> DeviceRange:
        if self.min > self.max:
            raise ValueError(f"min({self.min}) > max({self.max}); raise max or lower min")
        return self


class JobSpec(_Strict):
    """A training job as its user describes it. Sequences are `sequence_length` tokens; batches count sequences."""

    name: str
    model: ModelSpec
    data: str  # a file or a folder of text; or a tokenised .bin
    global_batch: Annotated[int, Field(ge=1, le=10_000_000)]
    sequence_length: Annotated[int, Field(ge=1, le=10_000_000)]
    steps: Annotated[int, Field(ge=1, le=1_000_000_000)]
    optimizer: OptimizerSpec = OptimizerSpec()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    precision: Precision = "fp32"
    devices: DeviceRange = DeviceRange()
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0  # strict tiers: higher goes first
    weight: Annotated[float, Field(gt=0)] = 1.0
    tenant: str = "default"
    layout: Layout | Literal["auto"] = "auto"
    snapshot_every_steps: Annotated[int, Field(ge=0)] = 20  # 0: only when asked for

    @field_validator("name", "tenant")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("must be 1-63 lower-case letters, digits or '-', with a letter or digit at both ends")
        return value

    @field_validator("model", mode="before")
    @classmethod
    def _model(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        unknown = sorted(map(str, set(value) - set(ModelSpec.__dataclass_fields__)))
        if unknown:
            raise ValueError(f"unknown keys {unknown}; known: {', '.join(ModelSpec.__dataclass_fields__)}")
        missing = [k for k in ("family", "layers", "hidden", "ffn", "heads", "vocab") if k not in value]
        if missing:
            raise ValueError(f"missing keys {missing}")
        return {"name": "custom", **value}  # its fields are checked one by one, then together by ModelSpec itself

    @field_validator("layout", mode="before")
    @classmethod
    def _layout(cls, value: Any) -> Any:
        return Layout.from_dict(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _fits(self) -> JobSpec:
        model = self.model
        if model.family == "gpt" and model.max_positions and model.max_positions < self.sequence_length:
            raise ValueError(f"sequence_length({self.sequence_length}) > model.max_positions({model.max_positions})")
        if isinstance(self.layout, Layout):
            from suika.core.layout import check_layout

            check_layout(self.layout, model, self.global_batch, self.sequence_length)
            if not self.devices.min <= self.layout.num_ranks <= self.devices.max:
                raise ValueError(
                    f"layout {self.layout} needs {self.layout.num_ranks} devices, "
                    f"outside devices min({self.devices.min})..max({self.devices.max})"
                )
        return self


def parse_job(data: Any) -> JobSpec:
    """A job file, parsed; raises `SpecError` that names the first wrong field, its value and the fix."""
    if not isinstance(data, dict):
        raise SpecError("job", data, "a job file must be a mapping", "see `suika submit --schema`")
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, SpecError):
            raise cause from None
        where = ".".join(["job", *(str(part) for part in first["loc"] if part != "Layout")])
        problem = str(cause) if cause is not None else first["msg"]
        fix = (
            "known: " + ", ".join(JobSpec.model_fields)
            if first["type"] == "extra_forbidden" and len(first["loc"]) == 1
            else ""
        )
        raise SpecError(where, first.get("input"), problem, fix) from None


class JobState(StrEnum):
    QUEUED = "queued"  # waits for devices; its reason says why
    UNSATISFIABLE = "unsatisfiable"  # no devices of this cluster could ever run it
    STARTING = "starting"  # processes are coming up
    RUNNING = "running"
    REDEPLOYING = "redeploying"  # trains on until the cut
    PREEMPTING = "preempting"  # saves its state, then gives up its devices
    RECOVERING = "recovering"  # lost a rank; starts again from its snapshot
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


S = JobState
ENDED = frozenset({S.FINISHED, S.FAILED, S.CANCELLED})
HOLDS_DEVICES = frozenset({S.STARTING, S.RUNNING, S.REDEPLOYING, S.PREEMPTING})
TRANSITIONS: dict[tuple[JobState, JobState], str] = {
    (S.QUEUED, S.STARTING): "devices were granted",
    (S.QUEUED, S.UNSATISFIABLE): "the cluster lost what the job needs",
    (S.UNSATISFIABLE, S.QUEUED): "the cluster grew",
    (S.STARTING, S.RUNNING): "the first optimizer step is done",
    (S.STARTING, S.RECOVERING): "a process died while coming up",
    (S.STARTING, S.PREEMPTING): "its devices are needed elsewhere",
    (S.STARTING, S.FAILED): "it cannot come up",
    (S.RUNNING, S.REDEPLOYING): "a decision moves it",
    (S.REDEPLOYING, S.RUNNING): "the move was committed or aborted",
    (S.RUNNING, S.PREEMPTING): "its devices are needed elsewhere",
    (S.REDEPLOYING, S.RECOVERING): "a process died and the old generation cannot go on",
    (S.PREEMPTING, S.QUEUED): "its state is saved",
    (S.PREEMPTING, S.RECOVERING): "a process died while saving",
    (S.RUNNING, S.RECOVERING): "a process died",
    (S.RECOVERING, S.STARTING): "devices were granted",
    (S.RECOVERING, S.QUEUED): "no devices are free to recover on",
    (S.RECOVERING, S.FAILED): "it died too often",
    (S.RUNNING, S.FINISHED): "all steps are done",
    (S.RUNNING, S.FAILED): "the program failed",
    (S.REDEPLOYING, S.FINISHED): "all steps were done before the cut",
    (S.STARTING, S.FINISHED): "its last step was its first after a start",
    (S.PREEMPTING, S.FINISHED): "all steps were done before it was saved",
    (S.REDEPLOYING, S.FAILED): "the program failed",
    (S.PREEMPTING, S.FAILED): "the program failed",
    **{(state, S.CANCELLED): "the user cancelled it" for state in S if state not in ENDED},
}
del S


class IllegalTransitionError(RuntimeError):
    """Our own mistake, never a user's."""


@dataclass(frozen=True)
class Job:
    """A submitted job. Every change goes through `to`, so that each has a reason. `generation` only grows."""

    id: str
    spec: JobSpec
    submitted_s: float
    state: JobState = JobState.QUEUED
    reason: Reason = field(default_factory=lambda: Reason(ReasonCode.QUEUED, "just submitted"))
    generation: int = 0
    plan: Plan | None = None  # of the running generation
    target: Plan | None = None  # of a move in flight
    last_generation: int = 0  # highest number handed out, aborted ones included: none is used twice
    steps_done: int = 0
    started_s: float | None = None
    ended_s: float | None = None
    num_moves: int = 0
    num_recoveries: int = 0  # since its last snapshot
    version: int = 0  # compare-and-set: a writer names the version it read

    def to(self, state: JobState, reason: Reason, **changes: Any) -> Job:
        """The job after a transition; raises `IllegalTransitionError` for an edge that is not in the table."""
        if (self.state, state) not in TRANSITIONS:
            raise IllegalTransitionError(f"job {self.id}: {self.state} -> {state} ({reason.sentence})")
        return replace(self, state=state, reason=reason, version=self.version + 1, **changes)

    def update(self, **changes: Any) -> Job:
        """The job with other fields changed, in the same state."""
        assert "state" not in changes, "states change through Job.to"
        return replace(self, version=self.version + 1, **changes)
