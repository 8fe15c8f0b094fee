"""`suika demo`: a local cluster with real jobs that are re-laid out while they train."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suika.cli.extras import need
from suika.cli.output import Column, JsonOption, OutputOption, emit, note
from suika.core.words import seconds, size

if TYPE_CHECKING:
    from suika.demo.result import DemoResult

INTERRUPTED = 130

JOB_COLUMNS = [
    Column("JOB", lambda row: row["name"]),
    Column("STEPS", lambda row: row["steps"]),
    Column("FINAL LOSS", lambda row: _decimals(row["final_loss"])),
    Column("COMPLETION", lambda row: seconds(row["jct_s"])),
    Column("LOSS DIFFERENCE", lambda row: f"{row['max_abs_loss_diff']:.1e}"),
]

PREDICTION_COLUMNS = [
    Column("JOB", lambda row: row["job"]),
    Column("LAYOUT", lambda row: _layout(row["layout"])),
    Column("STEP", lambda row: seconds(row["measured_step_s"])),
    Column("PREDICTED", lambda row: seconds(row["predicted_step_s"])),
    Column("BEFORE IT CAME", lambda row: seconds(row["foretold_step_s"])),
]

MOVE_COLUMNS = [
    Column("JOB", lambda row: row["job"]),
    Column("OLD", lambda row: _layout(row["old"])),
    Column("ON", lambda row: _devices(row["old_devices"])),
    Column("NEW", lambda row: _layout(row["new"])),
    Column("ON", lambda row: _devices(row["new_devices"])),
    Column("MOVED", lambda row: size(row["moved_bytes"])),
    Column("LEAST", lambda row: size(row["bound_bytes"])),
    Column("PAUSE", lambda row: seconds(row["pause_s"])),
    Column("CHECKPOINT+RESTART", lambda row: seconds(row["checkpoint_restart_s"])),
    Column("WHY", lambda row: row["reason"]),
]


def _decimals(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.6f}"


def _layout(layout: dict[str, Any]) -> str:
    from suika.cli.explained import layout_text

    return layout_text(layout)


def _devices(devices: list[str]) -> str:
    from suika.cli.explained import devices_text

    return devices_text(devices)


def demo(
    data: Annotated[Path | None, typer.Option(help="Text to train on: a file or a folder.")] = None,
    out: Annotated[Path, typer.Option(help="Where the report, the trace and the logs go.")] = Path("suika-demo"),
    rivals: Annotated[bool, typer.Option(help="Also do every move by checkpoint and restart.")] = True,
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """Run 8 CPU devices, three real jobs, and every kind of move; compare with unmoved twins and with restarts."""
    need("demo", "train")
    from suika.demo.run import run_demo
    from suika.demo.show import Show

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)  # ends as Ctrl-C does: nothing stays behind
    try:
        with Show() as show:
            result = run_demo(data.absolute() if data else None, out.absolute(), show, rivals)
    except KeyboardInterrupt:
        note(f"suika demo: interrupted; all processes are gone, logs are in {out.absolute()}")
        sys.exit(INTERRUPTED)
    except (RuntimeError, TimeoutError) as error:  # the machine's side failed: said, not shown as a traceback
        note(f"suika demo: {error}; all processes are gone, logs are in {out.absolute()}")
        if json or output in ("json", "yaml"):
            nothing = {
                "jobs": [],
                "redeployments": [],
                "max_abs_loss_diff": None,
                "ok": False,
                "problems": [str(error)],
            }
            emit(nothing, [], MOVE_COLUMNS, "json" if json else output)
        sys.exit(1)
    _print(result, "json" if json else output)
    sys.exit(0 if result.ok else 1)


def _print(result: DemoResult, output: Any) -> None:
    document = result.to_dict()
    emit(document, document["redeployments"], MOVE_COLUMNS, output)
    if output in ("json", "yaml"):
        return
    print()
    emit(document, document["jobs"], JOB_COLUMNS, output)
    print()
    emit(document, document["predictions"], PREDICTION_COLUMNS, output)
    cold = document["cold_restart_s"]
    print(f"\nlargest loss difference to the unmoved twins: {document['max_abs_loss_diff']:.1e}")
    if cold is not None:
        print(f"one restart with cold processes, for reference: {seconds(cold)}")
    for problem in document["problems"]:
        print(f"problem: {problem}")
    for kind, path in document["files"].items():
        print(f"{kind}: {path}")
    print("ok" if document["ok"] else "NOT ok")
