"""Text to tokens: a file or a folder becomes one memory-mapped `.bin` of bytes, with a manifest beside it.

Tokens are bytes (0..255), and 256 ends each file. Needs no torch: whoever submits a job prepares its data.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from suika.core.errors import SpecError, require

END_OF_FILE = 256
_TOKEN = np.dtype("<u2")
_PIECE_BYTES = 1 << 24  # read at a time: a file may be larger than memory
_SNIFF_BYTES = 8192  # a file with a zero byte in its first 8 KiB is taken for binary, as git and grep do


@dataclass(frozen=True)
class DataManifest:
    """What a `.bin` holds. It is valid exactly when its manifest exists and the sizes agree."""

    num_tokens: int
    vocab: int  # tokens are in [0, vocab)
    num_files: int
    num_skipped: int  # binary or unreadable files of a folder
    source: str
    sha256: str  # of the .bin
    tokenizer: str = "bytes"
    version: int = 1


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    pattern: str = "*",
    max_bytes: int = 0,
    end_of_file: bool = True,
) -> DataManifest:
    """Tokenise `source` (a file, or a folder walked in sorted order) into `out` (`.bin`), replacing it atomically.

    `pattern` chooses files of a folder by name; `max_bytes` > 0 stops after that many bytes of text. Hidden files,
    binary files and links are left out of a folder. Raises `SpecError` when there is nothing to read.
    """
    source, out = Path(source), Path(out)
    require(source.exists(), "data", str(source), "does not exist", "give a text file or a folder of text files")
    digest, num_tokens, num_files, num_skipped = hashlib.sha256(), 0, 0, 0
    left = max_bytes or sys.maxsize
    with _replacing(out) as file:
        for path in _files(source, pattern):
            before = left
            for text in _read_text(path, must=path == source):
                tokens = np.frombuffer(text[:left], np.uint8).astype(_TOKEN)
                left -= len(tokens)
                file.write(tokens.data)
                digest.update(tokens.data)
            if left == before:
                num_skipped += 1
                continue
            if end_of_file:
                file.write(_TOKEN.type(END_OF_FILE).tobytes())
                digest.update(_TOKEN.type(END_OF_FILE).tobytes())
            num_files += 1
            num_tokens += before - left + end_of_file
            if left == 0:
                break
        require(num_files > 0, "data", str(source), f"holds no text file that matches {pattern!r}")
    vocab = END_OF_FILE + 1 if end_of_file else END_OF_FILE
    manifest = DataManifest(num_tokens, vocab, num_files, num_skipped, str(source), digest.hexdigest())
    with _replacing(manifest_path(out)) as file:
        file.write(json.dumps(asdict(manifest), indent=1).encode())
    return manifest


def manifest_path(data: str | Path) -> Path:
    return Path(f"{data}.json")


def load_manifest(data: str | Path) -> DataManifest:
    """The manifest of a prepared `.bin`; raises `SpecError` where it is missing, foreign or does not fit the file."""
    data, path = Path(data), manifest_path(data)
    fix = "prepare it with `suika data`"
    require(data.is_file() and path.is_file(), "data", str(data), "is not prepared data (no .bin with a manifest)", fix)
    try:
        manifest = DataManifest(**json.loads(path.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise SpecError("data", str(path), f"is not a manifest: {error}", fix) from None
    stored = data.stat().st_size // _TOKEN.itemsize
    same = stored == manifest.num_tokens
    require(same, "data", str(data), f"holds {stored} tokens, its manifest says {manifest.num_tokens}", fix)
    return manifest


def open_tokens(data: str | Path) -> np.memmap:
    """The tokens of a prepared `.bin`, memory-mapped."""
    return np.memmap(data, _TOKEN, mode="r")


def _files(source: Path, pattern: str) -> Iterator[Path]:
    if source.is_file():
        yield source
        return
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            plain = path.is_file() and not path.is_symlink() and not name.startswith(".")
            if plain and fnmatch.fnmatch(name, pattern):
                yield path


def _read_text(path: Path, must: bool) -> Iterator[bytes]:
    """The bytes of a text file, in pieces; nothing for one that is binary or cannot be opened, unless it `must`."""
    try:
        file = path.open("rb")
    except OSError as error:
        require(not must, "data", str(path), f"cannot be read: {error.strerror}")
        return
    with file:
        piece = file.read(_PIECE_BYTES)
        if must:
            require(len(piece) > 0, "data", str(path), "is empty")
        elif b"\0" in piece[:_SNIFF_BYTES]:
            return
        while piece:
            yield piece
            piece = file.read(_PIECE_BYTES)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes `path`'s place when the block ends well, and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")  # pids repeat: nodes, containers
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
