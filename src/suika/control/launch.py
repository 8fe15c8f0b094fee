"""Brings up jobs' processes on this machine: data prepared once, then a `JobRun` on the local backend."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from suika.backends.local import LocalBackend
from suika.core.errors import SpecError, require
from suika.core.job import Job
from suika.runtime.command_run import CommandRun
from suika.runtime.coordinator import JobRun
from suika.runtime.events import JobEvent
from suika.train.data import load_manifest, manifest_path, prepare


class LocalLauncher:
    """`folder` keeps tokenised data and the jobs' snapshots."""

    def __init__(self, backend: LocalBackend, folder: Path) -> None:
        self.backend = backend
        self.folder = folder

    def prepare(self, job: Job) -> Path:
        if job.spec.rigid:
            return self.folder  # its data are its own business
        tokens = self._tokens_of(Path(job.spec.data))
        length, num = job.spec.sequence_length, load_manifest(tokens).num_tokens
        problem = f"has {num} tokens, too few for one window of sequence_length({length}) + 1"
        require(num > length, "job.data", job.spec.data, problem, "use more text or shorter sequences")
        return tokens

    def _tokens_of(self, source: Path) -> Path:
        if source.suffix == ".bin" and manifest_path(source).exists():
            load_manifest(source)
            return source
        tokens = self.folder / "data" / f"{_fingerprint(source)}.bin"
        try:
            load_manifest(tokens)
        except SpecError:
            prepare(source, tokens)
        return tokens

    def run(self, job: Job, data: Path, on_event: Callable[[JobEvent], None]) -> JobRun | CommandRun:
        folder = self.folder / "jobs" / job.id
        if job.spec.rigid:
            return CommandRun(job.id, job.spec, self.backend, self.backend.cluster, on_event)
        return JobRun(job.id, job.spec, self.backend, self.backend.cluster, folder, str(data), on_event)


def _fingerprint(source: Path) -> str:
    """Changes when the file, or anything below the folder, does."""
    digest = hashlib.sha256(os.fsencode(source.absolute()))
    paths = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    for path in paths:
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
