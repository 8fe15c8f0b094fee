"""Where a job's processes run and how they may be stopped: parts of a job file. Nothing here ever reaches a shell."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_serializer, field_validator, model_validator

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_RESERVED = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MAX_PATH, MAX_ARGUMENTS, MAX_COMMAND_BYTES = 4096, 4096, 100_000  # below the kernel's own limits
ENV_ITEM = "{env}"  # in a container command: `--env=NAME` for each variable that the job's processes get
Variables = Annotated[
    tuple[tuple[str, str], ...],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 256}),
]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def check_path(path: str) -> str:
    """An absolute path in its plain form; raises `ValueError`."""
    if not path.startswith("/"):
        raise ValueError("must be an absolute path; the command line makes paths in a job file absolute")
    if "\0" in path or len(path) >= MAX_PATH or not path.isprintable():
        raise ValueError(f"must be shorter than {MAX_PATH} characters, all of them printable")
    if ".." in path.split("/"):
        raise ValueError("must not lead upwards ('..')")
    return path


def check_argv(argv: Iterable[str]) -> tuple[str, ...]:
    """A program and its arguments, to be started as they are; raises `ValueError`."""
    words = tuple(argv)
    if len(words) > MAX_ARGUMENTS or sum(len(word) for word in words) > MAX_COMMAND_BYTES:
        raise ValueError(f"must be at most {MAX_ARGUMENTS} words of {MAX_COMMAND_BYTES} characters together")
    if any("\0" in word for word in words):
        raise ValueError("a word must not hold a NUL character")
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        raise ValueError("must be text that UTF-8 can say") from None
    if words and not words[0]:
        raise ValueError("the program's name is empty")
    return words


class Environment(Strict):
    """What a job's processes find. `venv` and `container` are two ways to say where its programs come from.

    `container` is the start of a command line, e.g. `[podman, run, --rm, --network=host, "{env}", IMAGE]`; the job's
    command follows it, and `{env}` becomes one `--env=NAME` per variable. `setup` is a command run once per node before
    the first rank starts there. `variables` come on top of a clean environment, not of the agent's.
    """

    venv: str | None = None
    container: tuple[str, ...] = ()
    variables: Variables = ()
    setup: tuple[str, ...] = ()
    workdir: str | None = None  # the command line fills in the job file's folder

    @field_validator("venv", "workdir")
    @classmethod
    def _path(cls, value: str | None) -> str | None:
        return None if value is None else check_path(value)

    @field_validator("container", "setup")
    @classmethod
    def _argv(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_argv(value)

    @field_validator("variables", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            if isinstance(value, tuple):  # as it is kept
                return value
            raise ValueError("must be a mapping of names to texts")
        for name, text in value.items():
            if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
                raise ValueError(f"{str(name)[:60]!r} is not a variable's name: letters, digits and '_'")
            if name in _RESERVED or name.startswith(("SUIKA_", "TORCHELASTIC_")):
                raise ValueError(f"{name} is set by Suika")
            if not isinstance(text, str):
                raise ValueError(f"{name} must be text; put quotes around numbers")
            check_argv(("_", text))
        if len(value) > 256:
            raise ValueError("must be at most 256 variables")
        return tuple(sorted(value.items()))

    @field_serializer("variables")
    def _mapping(self, value: tuple[tuple[str, str], ...]) -> dict[str, str]:
        return dict(value)

    @model_validator(mode="after")
    def _one_place(self) -> Environment:
        if self.venv is not None and self.container:
            raise ValueError("venv and container exclude each other: the container has its own programs")
        return self


class Preemption(Strict):
    """How the scheduler may take all of a job's devices away.

    `snapshot` (training jobs): its state is saved first. `grace` (commands): `signal` is sent to each rank's first
    process, and after `grace_s` SIGKILL to all that is left. `never`: it keeps its devices until it ends; a training
    job may still be moved live and shrunk within its range.
    """

    policy: Literal["never", "snapshot", "grace"] | None = None  # None: snapshot or grace, as the job is
    signal: str = "SIGTERM"
    grace_s: Annotated[float, Field(ge=0, le=86_400)] = 30.0

    @field_validator("signal")
    @classmethod
    def _known(cls, value: str) -> str:
        known = [name for name in signal.Signals.__members__ if name not in ("SIGKILL", "SIGSTOP")]
        if value not in known:
            raise ValueError(f"is no signal that a program can answer; known: {', '.join(known)}")
        return value
