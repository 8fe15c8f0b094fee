"""Odd YAML: a line that names the place, no traceback, and no endless work."""

from __future__ import annotations

from pathlib import Path

import pytest

from suika.cli.inputs import read_yaml
from suika.core.errors import SpecError

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"name: 2026-01-31", "file.name.*2026-01-31.*put quotes"),
        (b"data: {when: 2026-01-31T12:00:00Z}", "file.data.when"),
        (b"list: [x, [2026-01-31]]", r"file.list\[1\]\[0\]"),
        (b"a: 2026-13-99", "is not YAML"),
        (b"a: !!binary aGVsbG8=", "file.a.*bytes"),
        (b"a: !!set {x, y}", "file.a.*set"),
        (b"1: x", "no text, as a key must be"),
        (b"null: x", "no text, as a key must be"),
        (b"? [a, b]\n: c", "is not YAML"),
        (b"a: &a [*a]", "too many"),
        (b"a: &a {b: *a}", "too many"),
        (BOMB.encode(), "too many"),
        (b"[" * 5000, "is not YAML"),
        (b"a: [1,\n", "is not YAML"),
        (b"a: !!python/object/apply:os.system [id]", "is not YAML"),
        (b"a: \x00", "is not YAML"),
        (b"a: \xff\xfe", "is not YAML"),
        (b"x" * ((16 << 20) + 1), "is longer"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=said) as refused:
        read_yaml(path, "file")
    assert len(str(refused.value).splitlines()) == 1
    assert str(refused.value).isprintable()


def test_what_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.yaml", Path("/dev/zero")):
        with pytest.raises(SpecError, match=r"cannot be read|is longer"):
            read_yaml(path, "file")


def test_numbers_of_any_size_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("steps: 1" + "0" * 400 + "\nlr: 1.0e+3\nnan: .nan\nempty:\n")
    found = read_yaml(path, "file")
    assert (found["steps"], found["lr"], found["empty"]) == (10**400, 1000.0, None)
