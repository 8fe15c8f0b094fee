"""`suika submit | ps | describe | explain | resize | cancel`: jobs, asked of a running cluster."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from suika.cli.ask import OUTAGE_S, ask
from suika.cli.explained import devices_text, layout_text, show
from suika.cli.inputs import read_yaml
from suika.cli.output import Column, Format, JsonOption, OutputOption, emit, emit_document, note
from suika.core.words import seconds, size

JobArgument = Annotated[str, typer.Argument(help="Name or id of a job.")]
_EXIT_CODES = {"finished": 0, "failed": 1, "cancelled": 4}


JOB_COLUMNS = [
    Column("NAME", lambda row: row["name"]),
    Column("STATE", lambda row: row["state"]),
    Column("LAYOUT", lambda row: layout_text(row["layout"])),
    Column("DEVICES", lambda row: devices_text(row["devices"])),
    Column("STEPS", lambda row: f"{row['steps_done']}/{row['steps']}" if row["kind"] == "training" else None),
    Column("LOSS", lambda row: row["loss"]),
    Column("STEP", lambda row: seconds(row["step_s"])),
    Column("MOVES", lambda row: row["num_moves"]),
    Column("WHY", lambda row: row["reason"]["sentence"]),
    Column("ID", lambda row: row["id"], wide=True),
    Column("TENANT", lambda row: row["tenant"], wide=True),
    Column("PRIORITY", lambda row: row["priority"], wide=True),
    Column("PREDICTED", lambda row: seconds(row["predicted_step_s"]), wide=True),
    Column("CODE", lambda row: row["reason"]["code"], wide=True),
]

OPTION_COLUMNS = [
    Column("DEVICES", lambda row: row["devices"]),
    Column("SHAPE", lambda row: "+".join(map(str, row["shape"]))),
    Column("TYPE", lambda row: row["device_type"]),
    Column("LAYOUT", lambda row: layout_text(row["layout"])),
    Column("STEP", lambda row: seconds(row["step_s"])),
]

MOVE_COLUMNS = [
    Column("OLD", lambda row: layout_text(row["old"])),
    Column("ON", lambda row: devices_text(row["old_devices"])),
    Column("NEW", lambda row: layout_text(row["new"])),
    Column("ON", lambda row: devices_text(row["new_devices"])),
    Column("MOVED", lambda row: size(row["moved_bytes"])),
    Column("BOUND", lambda row: size(row["bound_bytes"])),
    Column("PAUSE", lambda row: seconds(row["pause_s"])),
    Column("TOTAL", lambda row: seconds(row["total_s"])),
    Column("WHY", lambda row: row["reason"]),
]


def submit(
    file: Annotated[Path | None, typer.Argument(help="A job file (YAML).")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of job files and exit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check it and show its options; submit nothing.")] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Wait for its end, and exit with a command's own code; else with 0 only if it finished."
        ),
    ] = False,
    request_id: Annotated[str | None, typer.Option(help="Makes a retry safe: same id, same job.")] = None,
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """Submit a job file. An impossible job is refused at once, with the reason."""
    if schema:
        from suika.core.job import JobSpec

        emit_document(JobSpec.model_json_schema())
        return
    if file is None:
        note("suika submit: name a job file, or --schema")
        sys.exit(2)
    job = read_yaml(file, "file")
    if isinstance(job, dict):
        _make_absolute(job, file.parent)
    shown = "json" if json else output
    answer = ask("submit", job=job, request_id=request_id, dry_run=dry_run)
    if dry_run:
        emit(answer, answer["options"], OPTION_COLUMNS, shown)
        return
    if wait:
        note(f"{answer['name']} was accepted as {answer['id']}")
        answer = _wait_for_end(answer["id"])
    emit(answer, [answer], JOB_COLUMNS, shown)
    if wait:
        code = answer.get("exit_code")  # a command's own
        sys.exit(_EXIT_CODES[answer["state"]] if code is None else code)


def _make_absolute(job: dict[str, Any], folder: Path) -> None:
    """Paths in a job file are relative to it: the controller and the nodes stand elsewhere. A command runs there too,
    unless it says where."""
    inside = job.get("environment", {} if job.get("command") else None)
    if isinstance(inside, dict):
        if job.get("command"):
            job["environment"] = inside = {"workdir": ".", **inside}
        _each_absolute(inside, ("workdir", "venv"), folder)
    _each_absolute(job, ("data", "final_checkpoint"), folder)


def _each_absolute(holder: dict[str, Any], fields: tuple[str, ...], folder: Path) -> None:
    for field in fields:
        if isinstance(holder.get(field), str):
            holder[field] = os.path.abspath(folder / Path(holder[field]).expanduser())


def _wait_for_end(job_id: str) -> dict[str, Any]:
    while True:
        row = ask("describe", job=job_id, patience_s=OUTAGE_S)
        if row["state"] in _EXIT_CODES:
            return row
        time.sleep(0.5)


def ps(
    all: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that have ended.")] = False,
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """List jobs, in order of submission."""
    rows = ask("jobs", all=all)
    emit({"jobs": rows}, rows, JOB_COLUMNS, "json" if json else output)
    if not rows:
        note("suika: no jobs yet" if all else "suika: no job runs or waits; --all shows those that have ended, too")


def describe(job: JobArgument, output: OutputOption = "table", json: JsonOption = False) -> None:
    """Show a job: its state, what it could run as, and every move with its bytes and pause."""
    row = ask("describe", job=job)
    shown = "json" if json else output
    if shown in ("json", "yaml"):
        emit_document(row, shown)
        return
    emit(row, [row], JOB_COLUMNS, "wide")
    if row["estimate"]:
        _show_estimate(row["estimate"], shown)
    print("\nOptions")
    emit(row, row["options"], OPTION_COLUMNS, shown)
    if row["redeployments"]:
        print("\nMoves")
        emit(row, row["redeployments"], MOVE_COLUMNS, shown)
    if copies := row.get("memory_copies"):
        _show_copies(copies)
    for straggler in row.get("stragglers", ()):
        print(f"\n{straggler['device']} is slow: {straggler['times']:.1f} times as long as its peers")
    for failed in row["failed_moves"]:
        print(f"\nA move failed: {failed['error']}")


def _show_copies(copies: Mapping[str, Any]) -> None:
    """Of the state in memory: the newest, and what is not well."""
    if copies["step"] is not None:
        print(f"\nCopies in memory: step {copies['step']}, {size(copies['num_bytes'])} on {', '.join(copies['nodes'])}")
    if copies["lacking"]:
        print(f"\nCopies in memory: {copies['lacking']}")


OTHER_COLUMNS = [
    Column("LAYOUT", lambda row: layout_text(row["layout"])),
    Column("STEP", lambda row: seconds(row["predicted_step_s"])),
    Column("P10", lambda row: seconds(row["p10_s"])),
    Column("P90", lambda row: seconds(row["p90_s"])),
]

FACTOR_COLUMNS = [
    Column("OP", lambda row: row["op_class"]),
    Column("FACTOR", lambda row: f"{row['factor']:.2f}"),
    Column("P10", lambda row: f"{row['p10']:.2f}"),
    Column("P90", lambda row: f"{row['p90']:.2f}"),
]


def _show_estimate(estimate: dict[str, Any], shown: Format) -> None:
    """Predicted beside measured, the other layouts of the present devices, and the factors behind both."""
    measured, error = estimate["measured_step_s"], estimate["error_percent"]
    told = f"{seconds(measured)} measured ({error:+.0f} %)" if measured else "not measured yet"
    predicted, cold = seconds(estimate["predicted_step_s"]), seconds(estimate["cold_step_s"])
    print(f"\nStep on {estimate['device_type']}: {predicted} predicted, {told}; {cold} cold")
    if estimate["others"]:
        print("\nOther layouts of these devices")
        emit(estimate, estimate["others"], OTHER_COLUMNS, shown)
    known = estimate["calibration"]
    if known and known["layouts"]:
        layouts = "; ".join(layout_text(seen["layout"]) for seen in known["layouts"])
        print(f"\nCalibration {known['version']}: {known['num_samples']} samples of {layouts}")
        emit(estimate, known["factors"], FACTOR_COLUMNS, shown)


def explain(job: JobArgument, output: OutputOption = "table", json: JsonOption = False) -> None:
    """Why a job has what it has, or why it waits."""
    told = ask("explain", job=job)
    shown = "json" if json else output
    if shown in ("json", "yaml"):
        emit_document(told, shown)
        return
    show(told, shown)


def resize(
    job: JobArgument,
    devices: Annotated[str | None, typer.Option(help="N or MIN:MAX; sets the layout back to auto.")] = None,
    layout: Annotated[str | None, typer.Option(help="tp=2,pp=2,dp=1[,layers_per_stage=3:2] or auto.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; show what the move would cost.")] = False,
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """Move a running job to another size or layout. The scheduler carries it out; `explain` says when it cannot."""
    row = ask("resize", job=job, devices=devices, layout=layout, dry_run=dry_run)
    if dry_run and not json and output in ("table", "wide"):
        _show_preview(row)
    else:
        emit(row, [row], JOB_COLUMNS, "json" if json else output)
        wish = f"layout {layout}" if layout else f"{devices} devices"
        note(f"suika: {wish} asked for; the next decision may move the job (`suika explain {job}` says why it waits)")


_LINK_COLUMNS = [
    Column("FROM", lambda row: row["source"]),
    Column("TO", lambda row: row["target"]),
    Column("OVER", lambda row: "network" if row["network"] else "node"),
    Column("BYTES", lambda row: size(row["bytes"])),
]


def _show_preview(row: Mapping[str, Any]) -> None:
    """Totals, then a link a line."""
    for side in ("old", "new"):
        print(f"{side}: {layout_text(row[side]['layout'])} on {devices_text(row[side]['devices'])}")
    print(f"moves {size(row['moved_bytes'])}, {size(row['network_bytes'])} of it between nodes; "
          f"{size(row['resident_bytes'])} stay where they are")  # fmt: skip
    pause, release = seconds(row["predicted_pause_s"]), seconds(row["predicted_release_s"])
    print(f"predicted: pause {pause}, devices free after {release}")
    for mode, memory in row["modes"].items():
        device, most = max(memory["peak_bytes"].items(), key=lambda item: item[1])
        node, needed = max(memory["needed_bytes"].items(), key=lambda item: item[1])
        how = "side by side (keep)" if mode == "keep" else "else piece by piece (lean)"
        print(f"{how}: at most {size(most)} of state, on {device}; needs {size(needed)} more on node {node}")
    if row["links"]:
        emit(row, row["links"], _LINK_COLUMNS, "table")


def cancel(job: JobArgument, output: OutputOption = "table", json: JsonOption = False) -> None:
    """End a job for good."""
    row = ask("cancel", job=job)
    emit(row, [row], JOB_COLUMNS, "json" if json else output)
