"""What this environment lacks of an extra. Looks; imports nothing."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

TO_TRAIN = ("torch", "xxhash")  # the modules of the extra `train`


def missing(modules: Iterable[str]) -> list[str]:
    """Those of `modules` that cannot be imported here."""
    return [module for module in modules if find_spec(module) is None]
