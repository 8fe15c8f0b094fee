"""An extra is there whole or not at all: half of it must not be found out by an import in the midst of a job."""

from __future__ import annotations

import subprocess
import sys

from suika.core.installed import TO_TRAIN, missing

# A machine whose torch is there, but not what the extra brings besides.
HALF = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "xxhash" else find(name, *more)
"""


def test_what_is_missing_is_named() -> None:
    assert missing(TO_TRAIN) == []
    assert missing(["json", "no_such_module", "sys"]) == ["no_such_module"]


def test_half_an_extra_runs_commands_only() -> None:
    def said(code: str) -> str:
        done = subprocess.run([sys.executable, "-c", HALF + code], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    assert "runs commands only" in said(
        "from suika.agent.rules import Rules\n"
        "print(Rules().refusal({'entry': 'suika.runtime.worker:main', 'launch': {}}))"
    )
    assert "has no xxhash: pip install" in said(
        "from importlib.metadata import version\nfrom suika.runtime.outside import check\n"
        "check(version('suika'), False)"
    )
    assert "suika demo needs xxhash" in said("from suika.cli.extras import need\nneed('demo', 'train')")
