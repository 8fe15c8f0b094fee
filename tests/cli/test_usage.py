"""`suika usage`: times as people write them, and a CSV that a spreadsheet reads."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from suika.cli import usage
from suika.cli.moments import moment
from suika.core.errors import SpecError

ROW = {"tenant": "a", "job": "j1", "name": "x", "device_type": "A800", "device_s": 7200.0, "waiting_s": 60.0}
REPORT: dict[str, Any] = {"since_s": 0.0, "until_s": 9000.0, "tenants": [], "jobs": []}
REPORT["jobs"] = [ROW | {"moves": 1, "failed_moves": 0, "moved_bytes": 5}]


def test_times_are_moments_or_ages() -> None:
    assert moment(None, "since") is None
    assert moment("90s", "since") == -90.0, "by the controller's clock"
    assert moment("1.5h", "since") == -5400.0
    assert moment("0s", "since") < 0, "now, not the epoch"
    assert moment("1970-01-02T00:00+00:00", "since") == 86400.0
    for wrong in ("soon", "12", "-3h", "2026-13-01", "9" * 400 + "d"):
        with pytest.raises(SpecError, match="since.*is no time"):
            moment(wrong, "since")


def test_csv_has_a_row_per_job_and_type(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(usage, "ask", lambda call, **arguments: asked.update(arguments) or REPORT)
    usage.usage(since="2h", tenant="a", output="csv")
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["name"], float(row["device_s"]), row["moves"]) == ("x", 7200.0, "1")
    assert (asked["tenant"], asked["since"], asked["until"]) == ("a", -7200.0, None)
    usage.usage(output="json")
    assert '"device_s": 7200.0' in capsys.readouterr().out
