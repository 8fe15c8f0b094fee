"""Logs: bounded in size and number, and a position stays a position over rotation."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from suika.runtime.forked import open_log
from suika.runtime.logs import RotatingLog, logs_in, path_of, prune, read


def test_any_writes_give_the_newest_bytes_in_bounded_files(tmp_path: Path) -> None:
    for seed in range(30):
        dice, folder = random.Random(seed), tmp_path / str(seed)
        folder.mkdir()
        most_bytes, most_files = dice.randrange(10, 200), dice.randrange(2, 6)
        path, written = path_of(folder, "j1.2.n_0/3"), b""
        log = RotatingLog(path, most_bytes, most_files)
        for _ in range(dice.randrange(1, 60)):
            data = dice.randbytes(dice.randrange(0, 150))
            log.write(data)
            written += data
            if dice.random() < 0.1:  # its writer is replaced
                log.close()
                log = RotatingLog(path, most_bytes, most_files)
        log.close()
        files = list(folder.iterdir())
        assert len(files) <= most_files
        assert all(file.stat().st_size <= most_bytes for file in files)
        (found,) = logs_in(folder, "j1.")
        assert (found.process, found.end) == ("j1.2.n_0/3", len(written))
        at, seen = 0, b""
        while at < found.end:  # what is gone is passed over, what is there comes whole
            data, after = read(folder, "j1.2.n_0/3", at, dice.randrange(1, 50))
            seen, at = seen + data, after
        assert seen == written[found.first :]
        assert read(folder, "j1.2.n_0/3", -7, 100)[0] == written[max(len(written) - 7, found.first) :]


def test_a_disk_that_is_full_when_a_file_is_begun_loses_lines_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of(tmp_path, "j1.1.n0/0")
    log = RotatingLog(path, 10)
    log.write(b"0123456789")
    with monkeypatch.context() as full:
        full.setattr(RotatingLog, "_open", _no_space)
        log.write(b"lost")
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)  # would be given a number that was closed too early
    log.write(b"kept")
    log.close()
    os.close(other)
    assert (tmp_path / "other").read_bytes() == b""
    assert read(tmp_path, "j1.1.n0/0", 0, 100)[0] == b"0123456789kept"


def _no_space(log: RotatingLog) -> int:
    raise OSError(errno.ENOSPC, "no space left")


def test_a_child_whose_log_cannot_be_kept_is_forked_all_the_same(tmp_path: Path) -> None:
    assert open_log({"process": "j1.1.n0/0", "log": str(tmp_path / "not" / "there.log")}) is None
    assert open_log({"process": "j1.1.n0/0", "log": str(tmp_path / "there.log")}) is not None


def test_a_follower_misses_nothing_that_is_still_there(tmp_path: Path) -> None:
    log, at, seen = RotatingLog(path_of(tmp_path, "p"), 64, 3), 0, b""
    for number in range(100):
        log.write(b"%04d\n" % number)
        if number % 7 == 0:
            data, at = read(tmp_path, "p", at, 1000)
            while data:
                seen += data
                data, at = read(tmp_path, "p", at, 1000)
    log.close()
    data, _ = read(tmp_path, "p", at, 1000)
    assert (seen + data).split() == [b"%04d" % number for number in range(100)]


def test_a_process_that_never_printed(tmp_path: Path) -> None:
    assert read(tmp_path, "nobody", 5, 10) == (b"", 5)
    assert logs_in(tmp_path) == []


def test_a_full_disk_does_not_stop_who_prints(tmp_path: Path) -> None:
    log = RotatingLog(path_of(tmp_path, "p"), 10, 2)
    log.write(b"0123456789")
    tmp_path.chmod(0o500)
    log._path = tmp_path / "gone" / "p.log"  # what cannot be renamed or opened
    log.write(b"more")
    tmp_path.chmod(0o700)


def test_what_cannot_be_rotated_is_not_written_elsewhere(tmp_path: Path) -> None:
    """The next file that is opened must not get the log's old number, nor what is printed, nor be closed with it."""
    path = path_of(tmp_path, "p")
    log = RotatingLog(path, 10, 2)
    log.write(b"0123456789")
    log._path = tmp_path / "gone" / "p.log"
    log.write(b"lost")
    with (tmp_path / "another").open("wb", buffering=0) as another:
        log.write(b"lost, too")
        log._path = path
        path.unlink()  # pruned
        log.write(b"here")
        log.close()
        another.write(b"its own")
    assert (tmp_path / "another").read_bytes() == b"its own"
    assert read(tmp_path, "p", 0, 100) == (b"here", 4)


def test_a_node_keeps_the_logs_that_were_written_last(tmp_path: Path) -> None:
    for number in range(6):
        log = RotatingLog(path_of(tmp_path, f"p{number}"), 10, 3)
        log.write(b"x" * 25)
        log.close()
        for part in tmp_path.glob(f"p{number}.log*"):
            os.utime(part, (number, number))
    prune(tmp_path, keep=2)
    assert [log.process for log in logs_in(tmp_path)] == ["p4", "p5"]
    assert len(list(tmp_path.iterdir())) == 6
