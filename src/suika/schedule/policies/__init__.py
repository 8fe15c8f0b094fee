"""Policies by name: `load("suika")`. One file each; a policy is a class with `name` and `decide(snapshot)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from suika.core.errors import SpecError
from suika.core.policy import Policy

# name -> module in this package, whose class is called `Policy`
NAMES: Mapping[str, str] = {
    "suika": "suika",
    "fifo": "fifo",
    "fifo-backfill": "fifo_backfill",
    "sjf": "sjf",
    "srtf": "srtf",
    "tiresias": "tiresias",
    "gavel": "gavel",
    "themis": "themis",
    "pollux": "pollux",
    "elasticflow": "elasticflow",
    "sia": "sia",
    "rubick": "rubick",
    "lyra": "lyra",
    "arena": "arena",
    "srpt": "srpt",
    "hesrpt": "hesrpt",
    "smartfill": "smartfill",
}


def load(name: str, **parameters: Any) -> Policy:
    """The policy called `name`, with its own parameters; raises `SpecError` for a name or parameter that is unknown."""
    if name not in NAMES:
        raise SpecError("policy", name, "unknown policy", f"known: {', '.join(NAMES)}")
    made: Any = import_module(f"suika.schedule.policies.{NAMES[name]}").Policy
    known = {field.name for field in fields(made) if field.init}
    unknown = sorted(set(parameters) - known)
    if unknown:
        raise SpecError(f"policy.{name}", unknown, "unknown parameters", f"known: {', '.join(sorted(known)) or 'none'}")
    policy: Policy = made(**parameters)
    return policy


def parse_policy(text: str) -> Policy:
    """`name` or `name:key=value,key=value`."""
    name, _, rest = text.partition(":")
    parameters: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, eq, value = part.partition("=")
        try:
            parameters[key] = float(value) if "." in value or "e" in value else int(value)
        except ValueError:
            raise SpecError("policy", text, f"'{part}' is not key=number", "write name:key=number,...") from None
        if not eq:
            raise SpecError("policy", text, f"'{part}' is not key=number")
    return load(name, **parameters)
