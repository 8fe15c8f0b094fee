"""Shared by all tests: no BLAS threads before anything imports it, signals as in a terminal, the shared data."""

from __future__ import annotations

import os
import signal
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

os.environ.setdefault("SUIKA_ALLOW_ROOT", "1")  # containers of continuous integration have no other user

# A shell's background jobs ignore SIGINT, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real traces and measurements; the test skips loudly where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"REAL DATA ABSENT: {SHARED} is not there")
    return SHARED
