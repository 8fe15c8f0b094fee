"""The demo's script: arrivals, a drain, users' wishes. Nothing here moves a job: the scheduler decides every move.

Each event waits for the jobs' own progress, never for the clock, so the story is the same on a slow machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

CLUSTER = "2x4:cpu"
SEQUENCE_LENGTH = 64
# Low enough that rounding stays rounding: at 3e-3 two *unmoved* runs that add up in another order (micro-batches of 1
# and of 16) come to differ by 2e-8 within 130 steps; at 1e-3 by 1e-14 (docs/numbers/demo.md).
LEARNING_RATE = 1e-3
VOCAB = 257  # bytes, and the end of a file
THREE_AXES = "tp=2,pp=2,dp=1,micro_batch=4"
UNEVEN = "tp=1,pp=2,dp=2,micro_batch=4,layers_per_stage=2:3"
SETTLE_STEPS = 7  # a job shows its new layout for so long before the script goes on


class Scene(Protocol):
    """What a condition may ask."""

    def steps(self, job: str) -> int: ...

    def ended(self, job: str) -> bool: ...

    def settled(self, job: str) -> bool:
        """It runs as its user wishes, its last move is measured, and it has done `SETTLE_STEPS` steps since."""
        ...

    def node_of(self, job: str) -> str:
        """The node of its first device."""
        ...

    def drained(self) -> str:
        """The node that is being kept empty."""
        ...


@dataclass(frozen=True)
class Event:
    """`call` with `arguments` (those that are functions are asked for at that time), once `when` holds."""

    what: str
    when: Callable[[Scene], bool]
    call: str
    arguments: Callable[[Scene], Mapping[str, Any]]


def llama(data: Path) -> dict[str, Any]:
    model = {"family": "llama", "layers": 5, "hidden": 64, "ffn": 160, "heads": 4, "kv_heads": 2, "vocab": VOCAB}
    return _job("llama", model, data, global_batch=16, steps=130, devices={"min": 1, "max": 8})


def gpt(data: Path) -> dict[str, Any]:
    model = {"family": "gpt", "layers": 4, "hidden": 48, "ffn": 192, "heads": 4, "vocab": VOCAB, "tied": True}
    return _job("gpt", model, data, global_batch=4, steps=64, devices={"min": 2, "max": 4})


def small(data: Path) -> dict[str, Any]:
    model = {"family": "llama", "layers": 2, "hidden": 32, "ffn": 96, "heads": 4, "vocab": VOCAB, "tied": True}
    return _job("small", model, data, global_batch=4, steps=12, devices={"min": 1, "max": 1})


def _job(name: str, model: dict[str, Any], data: Path, **rest: Any) -> dict[str, Any]:
    optimizer = {"lr": LEARNING_RATE, "warmup_steps": 5}
    fixed = {
        "sequence_length": SEQUENCE_LENGTH,
        "precision": "fp64",
        "optimizer": optimizer,
        "seed": 7,
        "snapshot_every_steps": 0,
    }
    return {"name": name, "model": model, "data": str(data)} | fixed | rest


def events(data: Path) -> tuple[Event, ...]:
    """The whole story, in order: an event waits for its own condition and for all before it."""

    def submit(job: dict[str, Any], what: str, when: Callable[[Scene], bool]) -> Event:
        return Event(what, when, "submit", lambda scene: {"job": job})

    def resize(job: str, what: str, when: Callable[[Scene], bool], **wish: str) -> Event:
        return Event(what, when, "resize", lambda scene: {"job": job, **wish})

    def llama_settled(scene: Scene) -> bool:
        return scene.settled("llama")

    return (
        submit(llama(data), "llama arrives and may use up to 8 devices", lambda s: True),
        resize("llama", "llama's user wants tp2 pp2 dp1", llama_settled, layout=THREE_AXES),
        Event(
            "llama's node is to be emptied",
            lambda s: s.settled("llama"),
            "drain",
            lambda s: {"node": s.node_of("llama")},
        ),
        resize("llama", "llama's user wants stages of 2 and 3 layers", llama_settled, layout=UNEVEN),
        Event("the node is back", llama_settled, "drain", lambda s: {"node": s.drained(), "undo": True}),
        resize("llama", "llama may use all devices again", lambda s: True, devices="1:8"),
        submit(gpt(data), "gpt arrives: room must be made", llama_settled),
        resize("gpt", "gpt's user wants dp3: a batch of 4 over 3", lambda s: s.settled("gpt"), layout="dp=3"),
        submit(small(data), "small arrives for the device that is left", lambda s: s.settled("gpt")),
        resize("gpt", "gpt may grow again", lambda s: s.ended("small"), devices="2:4"),
    )
