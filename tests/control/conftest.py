"""Makes `world` importable: tests are collected without packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from world import World


@pytest.fixture
def world(tmp_path: Path):
    made = World(tmp_path)
    yield made
    made.controller.close()
