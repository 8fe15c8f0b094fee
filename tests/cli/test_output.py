"""What people see: words of others' programs are words, not orders to a terminal."""

from __future__ import annotations

import pytest

from suika.cli.output import Column, emit, note


def test_a_terminal_obeys_no_jobs_words(capsys: pytest.CaptureFixture[str]) -> None:
    said = "\x1b]0;owned\x07\x1b[2J\rdoes not start \u202eÄ 好"
    emit({}, [{"why": said}], [Column("WHY", lambda row: row["why"])], "table")
    note(said)
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert "does not start" in text
        assert "Ä 好" in text
        assert all(char.isprintable() or char == "\n" for char in text)
