"""A finished training job's last snapshot, put where its user wants it: whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from suika.core.errors import SpecError, require
from suika.core.job import Job

Post = Callable[[Callable[[], None]], None]
Deliver = Callable[[Job, str, Callable[[str | None], None]], None]


def check_destination(path: str | None) -> None:
    """Raise unless a folder can be made there."""
    if path is None:
        return
    field, folder = "job.final_checkpoint", Path(path)
    require(folder.parent.is_dir(), field, path, "its parent is not a folder", "make that first")
    require(os.access(folder.parent, os.W_OK), field, path, "its parent cannot be written by the controller")
    require(not os.path.lexists(folder), field, path, "exists already", "give a path that is free")


def deliver(job: Job, snapshot: str) -> None:
    """Copy `snapshot` to the job's destination; there is nothing at it until all is there. Raises `OSError`, or
    `SpecError` if it was taken meanwhile. Begun again after a crash, it ends the same."""
    assert job.spec.final_checkpoint is not None
    destination = Path(job.spec.final_checkpoint)
    mark = f"suika-{job.id}"
    if (destination / mark).exists():
        return  # done before a crash
    check_destination(str(destination))
    draft = destination.with_name(f".{destination.name}.{job.id}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(snapshot, draft)
    (draft / mark).write_text(f"{snapshot}\n")
    for path in (*draft.rglob("*"), draft):
        _to_disk(path)
    draft.rename(destination)
    _to_disk(destination.parent)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def delivering(background: Callable[..., Future[None]], post: Post) -> Deliver:
    """Delivers off the loop; the result comes back on it: None, or what went wrong."""

    def start(job: Job, snapshot: str, done: Callable[[str | None], None]) -> None:
        def told(future: Future[None]) -> None:
            error = future.exception()
            text = None if error is None else str(error) if isinstance(error, SpecError) else repr(error)
            post(lambda: done(text))

        background(deliver, job, snapshot).add_done_callback(told)

    return start
