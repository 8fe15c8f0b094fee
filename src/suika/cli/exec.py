"""`suika exec -- COMMAND`: run and profile a PyTorch program without changing it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from suika.cli.output import Column, Format, JsonOption, OutputOption, emit, note, seconds, size
from suika.core.device_names import of_driver
from suika.core.errors import SpecError, require


def exec_(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, after --.")],
    device_type: Annotated[
        str | None, typer.Option(help="Of the devices it runs on; default: found, else cpu.")
    ] = None,
    skip: Annotated[int, typer.Option(min=1, help="Steps before the profiled window.")] = 5,
    steps: Annotated[int, typer.Option(min=1, max=100, help="Steps in the window.")] = 3,
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """Run and profile a PyTorch program without changing it, torchrun's children included.

    The program's own output goes to stderr; its exit code is ours.
    """
    from suika.estimate.catalog import resolve
    from suika.estimate.foreign import read_profile

    require(bool(command), "exec", command, "no command", "write suika exec -- python train.py")
    kind = resolve(device_type or _found_device()).name
    with tempfile.TemporaryDirectory(prefix="suika-exec-") as folder:
        code = _run(command, folder, skip, steps)
        documents = _documents(Path(folder))
    if not documents and code:
        raise typer.Exit(code)
    profile = read_profile(documents, kind)
    report = {
        "device_type": kind,
        "exit_code": code,
        "ranks": len({s.rank for s in profile.samples}),
        "step_s": profile.steady.step_s if profile.steady else None,
        "step_spread_s": profile.steady.spread_s if profile.steady else None,
        "samples": [s.to_dict() for s in profile.samples if s.op_s],
        "factors": profile.factors.table(),
        "errors": list(profile.errors),
    }
    output_as: Format = "json" if json else output
    emit(report, [_row(s) for s in report["samples"]], SAMPLE_COLUMNS, output_as)  # type: ignore[attr-defined]
    if output_as in ("table", "wide"):
        emit(report, [row for row in profile.factors.table() if row["factor"] != 1.0], FACTOR_COLUMNS, output)
        note(f"steady step: {seconds(report['step_s'])} ({report['ranks']} ranks on {kind})")  # type: ignore[arg-type]
    if not report["samples"] and not profile.errors:
        note(f"no window: the program took fewer than {skip + 1} optimizer steps (see --skip)")
    for error in dict.fromkeys(profile.errors):
        note(f"the profiler failed in the program: {error}")
    if code:
        raise typer.Exit(code)


def _run(command: list[str], folder: str, skip: int, steps: int) -> int:
    """The exit code of `command`, run with our hook first on its path; its stdout goes to stderr."""
    hook = str(Path(__file__).parent.parent / "runtime" / "hook")
    path = os.pathsep.join(filter(None, (hook, os.environ.get("PYTHONPATH"))))
    added = {"SUIKA_EXEC_DIR": folder, "SUIKA_EXEC_SKIP": str(skip), "SUIKA_EXEC_STEPS": str(steps), "PYTHONPATH": path}
    recorder = {"TORCH_FR_BUFFER_SIZE": "20000"}
    try:
        child = subprocess.Popen(command, stdout=2, env={**recorder, **os.environ, **added})
    except OSError as error:
        raise SpecError("exec", command[0], f"cannot be run: {error.strerror}") from None
    while True:
        try:
            code = child.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)  # it decides what an interrupt means


def _documents(folder: Path) -> list[dict[str, Any]]:
    import json

    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def _found_device() -> str:
    """The GPU's catalog name by the driver's tool; `cpu` where there is none."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        name = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "cpu"
    return of_driver(name)


def _row(sample: dict[str, Any]) -> dict[str, Any]:
    collectives = sample["collectives"]
    return {
        **sample,
        "traffic_bytes": sum(row[2] * row[4] for row in collectives),
        "traffic": sum(row[4] for row in collectives),
    }


OP_NAMES = ("gemm", "attention", "vector", "optimizer", "collective", "host")


def _op_seconds(name: str, row: Mapping[str, Any]) -> str:
    return seconds(row["op_s"].get(name))


SAMPLE_COLUMNS = (
    Column("RANK", lambda r: r["rank"]),
    Column("STEP", lambda r: r["step"]),
    Column("TIME", lambda r: seconds(r["step_s"])),
    *(Column(name.upper(), partial(_op_seconds, name)) for name in OP_NAMES),
    Column("IDLE", lambda r: seconds(r["idle_s"])),
    Column("MESSAGES", lambda r: r["traffic"] or None),
    Column("BYTES", lambda r: size(r["traffic_bytes"]) if r["traffic"] else None),
)
FACTOR_COLUMNS = (
    Column("OP CLASS", lambda r: r["op_class"]),
    Column("FACTOR", lambda r: r["factor"]),
    Column("P10", lambda r: r["p10"]),
    Column("P90", lambda r: r["p90"]),
)
