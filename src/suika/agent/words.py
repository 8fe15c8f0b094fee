"""What a node may say, and what of it must be there: checked before anything acts on it.

An agent is trusted with its own processes, not with the controller: a message that is not in order is refused whole.
"""

from __future__ import annotations

from typing import Any

from suika.agent.link import LinkError, Message
from suika.core.sample import StepSample

_NUMBER, _WHOLE, _TEXT = (int, float), (int,), (str,)
_NUMBER_OR_NULL = (int, float, type(None))
# What the coordinator reads of each thing that a rank or a store says.
SAID: dict[str, dict[str, tuple[type, ...]]] = {
    "ready": {},
    "store": {"host": _TEXT, "port": _WHOLE},
    "running": {"step": _WHOLE},
    "step": {
        "step": _WHOLE,
        "loss": _NUMBER_OR_NULL,  # null: not finite
        "grad_norm": _NUMBER_OR_NULL,
        "lr": _NUMBER_OR_NULL,
        "num_tokens": _WHOLE,
    },
    "sample": {"sample": (dict,)},
    "pong": {},
    "prepared": {"digest": _TEXT, "network_bytes": _WHOLE},
    "cut": {"step": _WHOLE},
    "verified": {"received_bytes": _WHOLE, "verify_s": _NUMBER},
    "resumed": {},
    "unable": {"error": _TEXT},
    "failed": {"error": _TEXT},
    "ended": {"step": _WHOLE, "outcome": _TEXT},
    "written": {"step": _WHOLE, "stall_s": _NUMBER},
    "unwritten": {"step": _WHOLE, "error": _TEXT},
    "published": {"step": _WHOLE, "path": _TEXT},
    "holding": {"host": _TEXT, "port": _WHOLE, "line": _TEXT, "token": _TEXT, "num_bytes": _WHOLE},
    "held": {"step": _WHOLE, "rank": _WHOLE, "alone": _WHOLE, "num_bytes": _WHOLE, "stall_s": _NUMBER, "meta": (dict,)},
    "unheld": {"error": _TEXT},
    "filled": {},
    "unfilled": {"error": _TEXT},
    "place": {"host": _TEXT, "port": _WHOLE},  # the rest: ranks of commands
    "set-up": {},
    "exited": {"code": _WHOLE},
    "no-start": {"error": _TEXT, "code": _WHOLE},
}
_LOG: dict[str, tuple[type, ...]] = {"process": _TEXT, "first": _WHOLE, "end": _WHOLE}
OUTCOMES = ("finished", "preempted")
MODES = ("keep", "lean")  # of a move; ranks of older nodes keep, and do not say so
_ABSENT = object()
_MAX_COLLECTIVES = 100_000  # of one kind in one step
_MAX_TEXT = 65536
MOST_LOGS, MOST_LOG_BYTES = 5000, 256 << 10  # in one answer
MOST_CALLED = 10_000  # processes in one roll call: more than a node can have


def check_event(event: Message) -> bool:
    """Raise `LinkError` unless `event` is in order. False: a word that only newer versions know, to be passed over."""
    match event.get("event"):
        case "hello":
            _check_hello(event)
        case "forked":
            _check(event, "forked", {"process": _TEXT, "pid": _WHOLE})
        case "exit":
            _check(event, "exit", {"process": _TEXT, "code": _WHOLE})
        case "message":
            _check(event, "message", {"process": _TEXT, "message": (dict,)})
            return _check_message(event["message"])
        case "alive":
            _check(event, "alive", {"processes": (list,)})
            if len(event["processes"]) > MOST_CALLED:
                raise LinkError("alive: must be a list of bounded length")
            for process in event["processes"]:
                _check({"process": process}, "alive", {"process": _TEXT})
        case "devices":
            _check_dirty(event.get("dirty"))
        case "memory":
            _check(event, "memory", dict.fromkeys(("total_bytes", "available_bytes", "limit_bytes"), _WHOLE))
        case "logs":
            _check_logs(event)
        case kind:
            raise LinkError(f"no such event: {str(kind)[:40]!r}")
    return True


def _check_hello(event: Message) -> None:
    _check(event, "hello", {"processes": (list,)})
    for entry in event["processes"]:
        if not isinstance(entry, dict):
            raise LinkError("hello: a process is no object")
        _check(entry, "hello", {"process": _TEXT, "pid": _WHOLE})


def _check_message(message: Message) -> bool:
    _check(message, "message", {"say": _TEXT})
    generation = message.get("generation", 0)
    if not isinstance(generation, int) or isinstance(generation, bool) or not 0 <= generation < 1 << 62:
        raise LinkError("generation must be a whole number")
    say = message["say"]
    if say not in SAID:
        return False
    _check(message, say, SAID[say])
    if say == "holding":
        _check({"request": 0} | message, say, {"request": _WHOLE})  # older ones do not say which they answer
    if say == "sample":
        _check_sample(message["sample"])
    if say == "prepared" and message.get("mode", "keep") not in MODES:
        raise LinkError(f"prepared: no such mode: {str(message['mode'])[:40]!r}")
    if say == "ended" and message["outcome"] not in OUTCOMES:
        raise LinkError(f"ended: no such outcome: {message['outcome'][:40]!r}")
    return True


def _check_sample(sample: Any) -> None:
    try:
        counts = [count for _, _, _, _, count, _ in sample["collectives"]]
        if any(not isinstance(count, int) or not 0 < count <= _MAX_COLLECTIVES for count in counts):
            raise ValueError("a count of collectives is out of range")
        StepSample.from_dict(sample)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LinkError(f"sample: {type(error).__name__}: {str(error)[:80]}") from None


def _check_dirty(dirty: Any) -> None:
    if not isinstance(dirty, dict):
        raise LinkError("devices: 'dirty' must be an object")
    for index, why in dirty.items():
        if not (isinstance(index, str) and index.isascii() and index.isdecimal() and len(index) < 6):
            raise LinkError("devices: an index is no number")
        if not isinstance(why, str) or len(why) > 500:
            raise LinkError("devices: a reason must be text")


def _check_logs(event: Message) -> None:
    """An answer to `logs` or to `read-log`."""
    _check(event, "logs", {"request": _WHOLE})
    if "logs" not in event:
        _check(event | {"data": ""}, "logs", {"data": _TEXT, "next": _WHOLE})
        data = event.get("data")
        if not isinstance(data, str) or len(data) > MOST_LOG_BYTES * 4 // 3 + 4 or not data.isascii():
            raise LinkError("logs: data must be base64 of bounded length")
        return
    logs = event["logs"]
    if not isinstance(logs, list) or len(logs) > MOST_LOGS:
        raise LinkError("logs: must be a list of bounded length")
    for log in logs:
        if not isinstance(log, list) or len(log) != 3:
            raise LinkError("logs: each is a process and two positions")
        _check(dict(zip(("process", "first", "end"), log, strict=True)), "logs", _LOG)


def _check(event: Message, where: str, fields: dict[str, tuple[type, ...]]) -> None:
    for name, kinds in fields.items():
        value = event.get(name, _ABSENT)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise LinkError(f"{where}: {name} is missing or of the wrong kind")
        if isinstance(value, str) and len(value) > _MAX_TEXT:
            raise LinkError(f"{where}: {name} is too long")
        if isinstance(value, int) and abs(value) >= 1 << 62:
            raise LinkError(f"{where}: {name} is too large")
