"""Text to tokens, and the order in which a job reads them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from suika.core.errors import SpecError
from suika.train.data import END_OF_FILE, load_manifest, open_tokens, prepare
from suika.train.dataset import Dataset, SampleOrder


def test_a_folder_becomes_bytes_with_an_end_after_each_file(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("bé")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt").write_text("c")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "image.bin").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").write_text("")
    manifest = prepare(tmp_path, tmp_path / "out" / "data.bin")
    tokens = open_tokens(tmp_path / "out" / "data.bin")
    end = END_OF_FILE
    assert tokens.tolist() == [ord("a"), end, ord("b"), 0xC3, 0xA9, end, ord("c"), end]
    assert (manifest.num_files, manifest.num_skipped, manifest.vocab) == (3, 2, 257)
    assert load_manifest(tmp_path / "out" / "data.bin") == manifest
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["data.bin", "data.bin.json"]


def test_pattern_limit_and_no_end_token(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x" * 100)
    (tmp_path / "b.py").write_text("y" * 100)
    (tmp_path / "c.md").write_text("z" * 100)
    manifest = prepare(tmp_path, tmp_path / "d.bin", pattern="*.py", max_bytes=130, end_of_file=False)
    assert (manifest.num_tokens, manifest.num_files, manifest.vocab) == (130, 2, 256)


def test_preparing_again_gives_the_same_file(tmp_path: Path) -> None:
    source = Path(os.__file__)
    one = prepare(source, tmp_path / "one.bin")
    two = prepare(source, tmp_path / "two.bin")
    assert one == two
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "two.bin").read_bytes()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda p: p / "nowhere", "does not exist"),
        (lambda p: (p / "empty.txt", (p / "empty.txt").write_text(""))[0], "is empty"),
        (lambda p: (p / "void", (p / "void").mkdir())[0], "holds no text file"),
    ],
)
def test_missing_and_empty_sources_are_refused(make, problem: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SpecError, match=problem):
        prepare(make(tmp_path), tmp_path / "out.bin")
    assert not list(tmp_path.glob("*out.bin*"))


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("x")

    def denied(self: Path, mode: str) -> None:
        assert mode == "wb" or self.name == "secret"
        if mode == "rb":
            raise PermissionError(13, "Permission denied")
        return opened(self, mode)

    opened = Path.open
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(SpecError, match="cannot be read: Permission denied"):
        prepare(tmp_path / "secret", tmp_path / "out.bin")


def test_data_that_is_not_prepared_or_was_cut_off_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("some text " * 20)
    with pytest.raises(SpecError, match="not prepared data"):
        Dataset(tmp_path / "t.txt", 16, 257, 0)
    prepare(tmp_path / "t.txt", tmp_path / "d.bin")
    with pytest.raises(SpecError, match=r"no window of sequence_length\(201\)"):
        Dataset(tmp_path / "d.bin", 201, 257, 0)
    with pytest.raises(SpecError, match="tokens up to 256"):
        Dataset(tmp_path / "d.bin", 16, 256, 0)
    with open(tmp_path / "d.bin", "r+b") as file:
        file.truncate(100)
    with pytest.raises(SpecError, match="holds 50 tokens, its manifest says 201"):
        Dataset(tmp_path / "d.bin", 16, 257, 0)


def test_windows_overlap_by_the_last_target(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(bytes(range(1, 100)))
    prepare(tmp_path / "t.txt", tmp_path / "d.bin")
    data = Dataset(tmp_path / "d.bin", 10, 257, 7)
    assert data.order.num_windows == 9
    samples = data.samples(0, 9)
    for window, sample in zip(data.order.windows(0, 9), samples, strict=True):
        assert sample.tolist() == list(range(10 * window + 1, 10 * window + 12))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    """B32: 64 windows, seed 7; a resume in epoch 2 at sample 20 reads what the unmoved run reads, whatever was read
    before and whatever the global generators did."""
    unmoved = SampleOrder(64, 7)
    everything = unmoved.windows(0, 64 * 4)
    np.random.seed(1)
    np.random.rand(100)
    resumed = SampleOrder(64, 7)
    position = 2 * 64 + 20
    assert resumed.epoch_of(position) == 2
    assert resumed.windows(position, 64 * 4).tolist() == everything[position:].tolist()
    epochs = everything.reshape(4, 64)
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4
    assert SampleOrder(64, 8).windows(0, 64).tolist() != epochs[0].tolist()


def test_a_batch_may_straddle_epochs() -> None:
    order = SampleOrder(5, 0)
    read = np.concatenate([order.windows(start, start + 3) for start in range(0, 15, 3)])
    assert all(sorted(epoch) == list(range(5)) for epoch in read.reshape(3, 5).tolist())


def test_large_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = bytes(range(1, 256)) * 10
    (tmp_path / "t.txt").write_bytes(text)
    prepare(tmp_path / "t.txt", tmp_path / "whole.bin")
    monkeypatch.setattr("suika.train.data._PIECE_BYTES", 7)
    prepare(tmp_path / "t.txt", tmp_path / "pieces.bin")
    assert open_tokens(tmp_path / "pieces.bin").tolist() == [*text, END_OF_FILE]
    assert load_manifest(tmp_path / "pieces.bin") == load_manifest(tmp_path / "whole.bin")
