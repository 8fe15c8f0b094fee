"""`JobSpec` (what a user writes), `Job` (what became of it) and the one table of state transitions."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_serializer, model_validator

from suika.core.decision import Reason, ReasonCode
from suika.core.environment import Environment, Preemption, Strict, check_argv, check_path
from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.plan import Plan
from suika.core.presets import preset

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
Precision = Literal["fp32", "fp64", "bf16"]

# What only a training job says, and what only a command says.
TRAINING_FIELDS = (
    *("model", "data", "global_batch", "sequence_length", "steps", "optimizer", "seed", "precision", "layout"),
    *("snapshot_every_steps", "memory_copy_every_steps", "final_checkpoint"),
)
COMMAND_FIELDS = ("command", "expected_s", "max_restarts", "outage_s")
_NEEDED_TO_TRAIN = TRAINING_FIELDS[:5]
# A command is one step of unknown inside on dp = its number of devices; no layout of it is ever priced or moved.
_UNKNOWN_INSIDE = {
    "model": ModelSpec("command", "gpt", layers=1, hidden=1, ffn=1, heads=1, vocab=1),
    "data": "",
    "global_batch": 1_000_000,
    "sequence_length": 1,
    "steps": 1,
    "snapshot_every_steps": 0,
}


class OptimizerSpec(Strict):
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


class DeviceRange(Strict):
    """How many devices the job can use; `type` pins a device type.

    `requested`: how many its user would ask for if the number could not change. A tenant's guarantee covers a job up to
    that, and policies that resize nobody give just that. None: `max`, since devices that are guaranteed to a tenant are
    its own as long as its jobs can use them; who wants them for more jobs at once says less.
    """

    min: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    max: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    requested: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    type: str | None = None

    @model_validator(mode="after")
    def _ordered(self) -> DeviceRange:
        if self.min > self.max:
            raise ValueError(f"min({self.min}) > max({self.max}); raise max or lower min")
        if self.requested is not None and not self.min <= self.requested <= self.max:
            raise ValueError(f"requested({self.requested}) is outside min({self.min})..max({self.max})")
        return self


def _say_which_fields(schema: dict[str, Any]) -> None:
    """In the JSON Schema: a training job's fields, or a command's."""
    schema["required"] = ["name"]
    schema["anyOf"] = [{"required": list(_NEEDED_TO_TRAIN)}, {"required": ["command"]}]
    schema["properties"]["command"]["minItems"] = 1


class JobSpec(Strict):
    """A job as its user describes it: a training job, or any `command` as a gang of one process per device (rigid).

    Sequences are `sequence_length` tokens; batches count sequences.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, json_schema_extra=_say_which_fields)

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
    # How often the state is also kept in nodes' memory, each part of it on two of them. 0: never.
    memory_copy_every_steps: Annotated[int, Field(ge=0)] = 0
    final_checkpoint: str | None = None  # a folder that is made once all steps are done
    command: tuple[str, ...] = ()  # a rigid job: this, once per device, with the environment variables of torchrun
    expected_s: Annotated[float, Field(gt=0, le=1e9)] = 3600.0  # how long a command is expected to run
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3  # of a command that fails; preemptions do not count
    # How long a command runs on without its controller. After its node was lost it begins again elsewhere only when
    # that time is over: nothing of it then runs twice.
    outage_s: Annotated[float, Field(ge=1, le=1e7)] = 120.0
    environment: Environment = Environment()
    preemption: Preemption = Preemption()

    @property
    def rigid(self) -> bool:
        """Whether it is a command, which can be neither moved live nor resized."""
        return bool(self.command)

    @property
    def stoppable(self) -> bool:
        """Whether the scheduler may take all its devices away."""
        return self.preemption.policy != "never"

    @model_validator(mode="before")
    @classmethod
    def _command_or_training(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        command = data.get("command")
        if command in (None, [], ()):
            extra = [field for field in COMMAND_FIELDS[1:] if field in data]
            if extra:
                raise SpecError(f"job.{extra[0]}", data[extra[0]], "is for commands", "leave it out or give a command")
            return data
        extra = [field for field in TRAINING_FIELDS if field in data]
        if extra:
            value = data[extra[0]]
            raise SpecError(
                f"job.{extra[0]}", value, "is for training jobs; a command trains by itself", "leave it out"
            )
        return data | _UNKNOWN_INSIDE

    @model_serializer(mode="wrap")
    def _only_its_own_fields(self, handler: Any) -> dict[str, Any]:
        foreign = TRAINING_FIELDS if self.rigid else COMMAND_FIELDS
        return {field: value for field, value in handler(self).items() if field not in foreign}

    @field_validator("command", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError("must be a list of words, a program and its arguments: nothing is given to a shell")
        return value

    @field_validator("command")
    @classmethod
    def _argv(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_argv(value)

    @field_validator("final_checkpoint")
    @classmethod
    def _path(cls, value: str | None) -> str | None:
        return None if value is None else check_path(value)

    @field_validator("name", "tenant")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("must be 1-63 lower-case letters, digits or '-', with a letter or digit at both ends")
        return value

    @field_validator("model", mode="before")
    @classmethod
    def _model(cls, value: Any) -> Any:
        """A model's own keys, the name of a preset, or `preset` with the keys that differ from it."""
        if isinstance(value, str):
            value = {"preset": value}
        if isinstance(value, ModelSpec):
            return value
        if not isinstance(value, dict):
            raise ValueError("must be a mapping or the name of a preset")
        if "preset" in value:
            changed = {key: v for key, v in value.items() if key != "preset"}
            value = _said_by(preset(str(value["preset"]))) | ({"name": f"{value['preset']} changed"} if changed else {})
            value |= changed
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
    def _preemptable(self) -> JobSpec:
        policy, right = self.preemption.policy, "grace" if self.rigid else "snapshot"
        if policy not in (None, "never", right):
            kind = "a command" if self.rigid else "a training job"
            fix = f"use {right} or never"
            raise SpecError("job.preemption.policy", policy, f"is not for {kind}", fix)
        return self

    @model_validator(mode="after")
    def _fits(self) -> JobSpec:
        if self.rigid:
            return self._fits_a_gang()
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

    def _fits_a_gang(self) -> JobSpec:
        low, high = self.devices.min, self.devices.max
        if low != high:
            raise SpecError("job.devices", f"{low}..{high}", "a command is rigid", "set min and max to one number")
        return self


def _said_by(model: ModelSpec) -> dict[str, Any]:
    """The fields of `model`, less those that follow from others: one that is changed then carries them along."""
    follows = {
        "kv_heads": model.kv_heads == model.heads,
        "head_dim": model.head_dim * model.heads == model.hidden,
        "balance": not model.experts,
        "lora": model.lora is None,
    }
    return {field: value for field, value in vars(model).items() if not follows.get(field)}


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
        if first["type"] == "missing":
            raise _missing(where, first["loc"], error.errors()) from None
        problem = str(cause) if cause is not None else first["msg"]
        fix = (
            "known: " + ", ".join(JobSpec.model_fields)
            if first["type"] == "extra_forbidden" and len(first["loc"]) == 1
            else ""
        )
        raise SpecError(where, first.get("input"), problem, fix) from None


def _missing(where: str, place: tuple[Any, ...], errors: list[Any]) -> SpecError:
    """A key that is not there; perhaps one beside it is the same, mistyped."""
    beside = [e["loc"][-1] for e in errors if e["type"] == "extra_forbidden" and e["loc"][:-1] == place[:-1]]
    if near := difflib.get_close_matches(str(place[-1]), map(str, beside), 1):
        return SpecError(where, None, "is missing", f"is {near[0]!r} meant for it?")
    return SpecError(where, None, "is missing", "`suika submit --schema` shows what a job file needs")


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
    exit_code: int | None = None  # of a command that ended by itself: that of the first rank that failed, else 0
    not_before_s: float | None = None  # what is left of it on a lost node may run until then
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
