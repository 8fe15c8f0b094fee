"""`suika exec`: an unchanged program, one process and torchrun's children; its samples, factors and exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
torch.set_num_threads(1)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128))
if dist.is_initialized():
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    model(torch.randn(64, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""


def run(tmp_path: Path, *command: str, code: int = 0) -> Any:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "suika.cli", "exec", "--json", "--device-type", "cpu", "--", *command]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


def test_one_process(tmp_path: Path) -> None:
    report = run(tmp_path, sys.executable, "program.py")
    assert report["errors"] == []
    assert (report["ranks"], report["exit_code"]) == (1, 0)
    assert {s["step"] for s in report["samples"]} == {5, 6, 7}
    first = report["samples"][0]
    assert first["op_s"]["gemm"] > 0
    assert first["op_s"]["optimizer"] > 0
    assert first["profiler_s"] > 0
    gemm = next(f for f in report["factors"] if f["op_class"] == "gemm")
    assert gemm["factor"] != 1.0
    assert gemm["p10"] < gemm["factor"] < gemm["p90"]


def test_torchrun_children_are_seen_with_their_collectives(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    report = run(tmp_path, *launcher, "program.py")
    assert report["ranks"] == 2
    logged = [row for s in report["samples"] for row in s["collectives"]]
    assert logged
    parameter_bytes = 4 * (2 * 128 * 512 + 512 + 128)
    per_rank_and_step = sum(row[2] * row[4] for row in logged) / 2 / 3
    assert per_rank_and_step == pytest.approx(parameter_bytes, rel=0.01)
    assert {row[3] for row in logged} == {2}
    assert any(f["op_class"] == "dp" and f["factor"] != 1.0 for f in report["factors"])


def test_exit_codes_and_mistakes(tmp_path: Path) -> None:
    assert run(tmp_path, sys.executable, "program.py", "3", code=3)["exit_code"] == 3
    assert "took no optimizer step" in run(tmp_path, sys.executable, "-c", "pass", code=2)
    assert "cannot be run" in run(tmp_path, "./no-such-program", code=2)


def test_a_program_that_ends_inside_the_window_ends_as_it_would_have(tmp_path: Path) -> None:
    """Its exit code and the steps it took are there, whatever its RANK is, and YAML is one document."""
    alone = PROGRAM.replace("range(10)", "range(6)").replace('"RANK" in os.environ', "False")
    (tmp_path / "short.py").write_text(alone)
    words = [sys.executable, "-m", "suika.cli", "exec", "-o", "yaml", "--device-type", "cpu", "--"]
    command = [*words, sys.executable, "short.py", "4"]
    odd = {**os.environ, "RANK": "first", "WORLD_SIZE": ""}
    done = subprocess.run(command, cwd=tmp_path, env=odd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4, done.stderr
    report = yaml.safe_load(done.stdout)
    assert (report["exit_code"], report["errors"]) == (4, [])
    assert [s["step"] for s in report["samples"]] == [5]
    assert report["samples"][0]["op_s"]["gemm"] > 0
