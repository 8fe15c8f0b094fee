"""What a command needs beyond the light install is said at once, with the line that installs it."""

from __future__ import annotations

import pytest

from suika.cli import extras


def test_a_missing_extra_is_named_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(extras.MODULES, "server", ("no_such_module",))
    with pytest.raises(SystemExit) as ended:
        extras.need("up", "server", "train")
    assert ended.value.code == 1
    assert "no_such_module: pip install 'suika[server,train]'" in capsys.readouterr().err


def test_nothing_is_said_when_all_is_there() -> None:
    extras.need("up", "server", "train")
