"""One live cluster for all tests of a session: 2 nodes x 4 CPU devices, real processes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="live jobs train: the extra `train` is needed")
sys.path.insert(0, str(Path(__file__).parent))

from live import Live

from suika.control.service import Service
from suika.core.cluster import parse_cluster_shorthand
from suika.demo.scene import Recorder


@pytest.fixture(scope="session")
def cluster() -> Iterator[Live]:
    with tempfile.TemporaryDirectory(prefix="suika-live-") as folder:
        text = Path(folder) / "text"
        text.write_text("the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs\n" * 400)
        recorder = Recorder()
        with Service(parse_cluster_shorthand("2x4:cpu"), Path(folder) / "home", listener=recorder) as service:
            yield Live(service, recorder, text)


@pytest.fixture
def live(cluster: Live) -> Iterator[Live]:
    yield cluster
    cluster.clear()
