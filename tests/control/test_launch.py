"""What is found out about a job's data before any rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from suika.control.launch import LocalLauncher
from suika.core.errors import SpecError
from suika.core.job import Job, parse_job

MODEL = {"family": "llama", "layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257}


def test_too_little_text_is_said_with_the_users_file(tmp_path: Path) -> None:
    text = tmp_path / "text"
    fields: dict[str, Any] = {"name": "a", "model": MODEL, "data": str(text), "global_batch": 8, "steps": 10}
    job = Job("j1", parse_job(fields | {"sequence_length": 64}), 1.0)
    launcher = LocalLauncher(None, tmp_path)  # type: ignore[arg-type]  # no process is started
    text.write_text("short")
    with pytest.raises(SpecError, match=r"job.data=.*/text.*tokens.*sequence_length\(64\)"):
        launcher.prepare(job)
    text.write_text("long enough " * 100)
    assert launcher.prepare(job).suffix == ".bin"
