"""Seeded garbage at the doors: job files and agents' frames. No crash, and what is refused changes nothing."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from test_agents import Job, Node, Notes
from world import World

from suika.agent.link import LinkError
from suika.control.agents import AgentHub
from suika.control.pricing import EstimatedPricing
from suika.core.errors import SpecError

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", " ", "a", "A", "a-", "x" * 64, "x" * 5000, "\0", "\ud800", "ü", "../..", "/"),
    *("<script>", "1e9", "tp=2", [], [[]], [1, 2], {}, {"a": 1}, {"tp": 2}, {"min": 1, "max": 2}, [None] * 50),
)


COMMAND: dict[str, Any] = {
    "command": ["python", "train.py", "--lr", "1e-4"],
    "devices": {"min": 4, "max": 4},
    "expected_s": 100.0,
    "max_restarts": 2,
    "outage_s": 60.0,
    "preemption": {"policy": "grace", "signal": "SIGUSR1", "grace_s": 30.0},
    "environment": {
        "container": ["podman", "run", "{env}", "image"],
        "variables": {"A": "1"},
        "setup": ["make", "data"],
        "workdir": "/tmp",
    },
}


def mutate(value: Any, dice: random.Random, depth: int = 0) -> Any:
    """`value` with one thing changed, somewhere."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        changed = dict(value)
        key = dice.choice(sorted(changed))
        kind = dice.random()
        if kind < 0.15:
            del changed[key]
        elif kind < 0.25:
            changed[dice.choice(["", "name", "owner", "x" * 300, "layout", "n", "m", "ack"])] = dice.choice(ODD)
        else:
            changed[key] = mutate(changed[key], dice, depth + 1)
        return changed
    if isinstance(value, list) and value and dice.random() < 0.7:
        changed = list(value)
        place = dice.randrange(len(changed))
        changed[place] = mutate(changed[place], dice, depth + 1)
        return changed
    return copy.deepcopy(dice.choice(ODD))


def attack_submit(world: World, num_inputs: int, seed: int) -> tuple[int, int]:
    """(accepted, refused) of `num_inputs` mutated job files. An accepted one is cancelled again."""
    world.controller.pricing = EstimatedPricing(world.cluster)  # what is accepted must also have a price
    dice, counts = random.Random(seed), [0, 0]
    layout = {"tp": 2, "pp": 1, "dp": 2, "micro_batch": 1}
    optimizer = {"lr": 0.1, "betas": [0.9, 0.95], "warmup_steps": 3}
    for number in range(num_inputs):
        body: Any = world.file(f"j{number}", optimizer=optimizer, priority=1, seed=4, precision="fp32")
        body["devices"] = {"min": 1, "max": 4, "type": "cpu"}
        body |= {
            "final_checkpoint": "/tmp/never",
            "preemption": {"policy": "snapshot", "signal": "SIGTERM", "grace_s": 5},
        }
        body["environment"] = {"variables": {"A": "1", "B_2": "x y"}}
        if number % 2:
            body["layout"] = layout
        if number % 3 == 0:
            body = copy.deepcopy(COMMAND) | {"name": f"j{number}"}
        for _ in range(dice.choice((1, 1, 2, 3))):
            body = mutate(body, dice)
        before = (len(world.store.jobs()), len(world.store.events()))
        try:
            made = world.api.submit(body)
        except SpecError:
            assert (len(world.store.jobs()), len(world.store.events())) == before, body
            counts[1] += 1
        else:
            json.dumps(made, allow_nan=False)
            world.api.cancel(made["id"])
            counts[0] += 1
    return counts[0], counts[1]


def attack_hub(num_inputs: int, seed: int) -> tuple[int, int]:
    """(taken, refused) of `num_inputs` mutated frames from a node that is connected and has a process."""
    dice, counts, notes = random.Random(seed), [0, 0], Notes()
    hub = AgentHub(notes)
    node, job = Node(hub), Job()
    node.connect()
    node.greet()
    hub.spawn("j.1.n0/0", "n0", "entry", {}, job)
    numbers = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "num_tokens": 5, "at_s": 1.0}
    sample = {"job_id": "j", "generation": 1, "step": 3, "rank": 0, "step_s": 1.0, "op_s": {"tp": 0.1}}
    sample["collectives"] = [["tp", "all_reduce", 64, 2, 3, 0.1]]
    said = [
        {"say": "step", "generation": 1, "step": 3, **numbers},
        {"say": "published", "generation": 1, "step": 3, "path": "/x"},
        {"say": "ended", "generation": 1, "step": 3, "outcome": "finished"},
        {"say": "sample", "generation": 1, "sample": sample},
    ]
    said += [
        {"say": "place", "generation": 1, "host": "127.0.0.1", "port": 4},
        {"say": "exited", "generation": 1, "code": 3},
        {"say": "no-start", "generation": 1, "code": 3, "error": "why"},
    ]
    events: list[Any] = [{"event": "message", "process": "j.1.n0/0", "message": message} for message in said]
    events += [{"event": "forked", "process": "j.1.n0/0", "pid": 7}, {"event": "devices", "dirty": {"1": "used"}}]
    events.append({"event": "logs", "request": 1, "logs": [["j.1.n0/0", 0, 5]]})
    events.append({"event": "logs", "request": 1, "data": "aGk=", "next": 2})
    events.append({"event": "hello", "processes": [{"process": "j.1.n0/0", "pid": 7}]})
    for _ in range(num_inputs):
        # A node that was refused, or whose process was declared gone, begins anew.
        frame: Any = {"n": node.wire._last + 1, "ack": node.wire.received, "m": dice.choice(events)}
        frame = mutate(frame, dice)
        try:
            text = json.dumps(frame)
        except (ValueError, RecursionError):
            continue
        if dice.random() < 0.1:
            text = text[: dice.randrange(len(text))]
        attached = hub._nodes["n0"]
        before = (list(notes.said), list(job.heard), attached.wire.received, dict(attached.listeners))
        try:
            hub.receive("n0", node.connection, text)
        except LinkError:
            assert (list(notes.said), list(job.heard), attached.wire.received, dict(attached.listeners)) == before, text
            counts[1] += 1
        else:
            counts[0] += 1
            node.wire._last = attached.wire.received
            if "j.1.n0/0" not in attached.listeners:
                hub.spawn("j.1.n0/0", "n0", "entry", {}, job)
        notes.said, job.heard = notes.said[-3:], job.heard[-3:]
    return counts[0], counts[1]


def test_job_files(world: World) -> None:
    accepted, refused = attack_submit(world, 600, seed=1)
    assert accepted > 20
    assert refused > 200


def test_agents_frames() -> None:
    taken, refused = attack_hub(2500, seed=1)
    assert taken > 100
    assert refused > 1000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_at_length(world: World, tmp_path: Path) -> None:
    files, frames = attack_submit(world, 10_000, seed=2), attack_hub(50_000, seed=2)
    print(f"job files (accepted, refused): {files}; frames: {frames}")
    assert sum(files) == 10_000
