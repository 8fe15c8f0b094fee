"""`suika plan MODEL`: rank the layouts of a model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from suika.cli.inputs import read_cluster
from suika.cli.output import Column, JsonOption, OutputOption, emit, note, seconds, size
from suika.core.errors import SpecError, require

if TYPE_CHECKING:
    from suika.core.model import ModelSpec
    from suika.plan.ranking import RankedPlan


def plan(
    model: Annotated[str, typer.Argument(help="A preset, a config.json, or a file of Megatron flags.")],
    cluster: Annotated[str, typer.Option(help="A YAML file, or NODESxDEVICES:TYPE.")],
    global_batch: Annotated[int, typer.Option(min=1, max=10_000_000, help="Sequences per optimizer step.")],
    sequence_length: Annotated[int, typer.Option(min=1, max=10_000_000, help="Tokens per sequence.")],
    devices: Annotated[int, typer.Option(help="How many devices; 0: all of the cluster.")] = 0,
    device_type: Annotated[str | None, typer.Option(help="Which type, where the cluster has several.")] = None,
    precision: Annotated[str, typer.Option(help="bf16, fp16, fp32, fp8, mxfp8 or nvfp4.")] = "bf16",
    space: Annotated[
        Literal["megatron", "built-in"], typer.Option(help="Which layouts: a Megatron-style stack's or our trainer's.")
    ] = "megatron",
    top: Annotated[int, typer.Option(min=1, max=1000, help="How many plans to show.")] = 10,
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """Rank the layouts of a model on a cluster: time with its parts, memory with its parts, and why others lost."""
    from suika.estimate.predict import setting
    from suika.plan.layouts import BUILT_IN, MEGATRON
    from suika.plan.ranking import rank_layouts

    topology = read_cluster(cluster)
    types = sorted({node.device_type for node in topology.nodes})
    require(device_type is not None or len(types) == 1, "device_type", types, "the cluster has several", "choose one")
    meant = topology.types_named(device_type or types[0])
    require(bool(meant), "device_type", device_type, "no node has this type", f"known: {', '.join(types)}")
    have = sum(node.num_devices for node in topology.nodes if node.device_type in meant)
    require(0 <= devices <= have, "devices", devices, f"the cluster has {have}")
    s = setting(
        read_model(model),
        meant[0],
        global_batch=global_batch,
        sequence_length=sequence_length,
        precision=precision,
        cluster=topology,
    )
    s.device.peak(precision)  # refuses unknown precisions
    ranking = rank_layouts(s, devices or have, MEGATRON if space == "megatron" else BUILT_IN, top)
    if not ranking.num_layouts:
        raise SpecError(
            "plan",
            f"{devices or have} devices",
            "no layout is legal there",
            "change the number of devices or the batch",
        )
    document = {
        "model": s.model.name,
        "device_type": s.device.name,
        "devices": devices or have,
        "layouts": ranking.num_layouts,
        "fitting": ranking.num_fitting,
        "plans": [_document(p) for p in ranking.plans],
        "rejected": [_document(p) for p in ranking.rejected],
    }
    rows = document["plans"] + (document["rejected"] if output == "wide" or not ranking.plans else [])  # type: ignore[operator]
    emit(document, rows, COLUMNS, "json" if json else output)
    if output in ("table", "wide") and not json:
        note(f"{ranking.num_layouts} legal layouts on {devices or have} x {s.device.name}, {ranking.num_fitting} fit")
        for rejected in ranking.rejected[:2]:
            note(f"{rejected.layout}: {rejected.why}")


def read_model(text: str) -> ModelSpec:
    """MODEL of the command line: a preset's name, a path to a config.json or to a file of Megatron flags."""
    import json

    from suika.core.dialects import from_huggingface, model_from_megatron
    from suika.core.presets import preset

    if text.startswith("--"):
        return model_from_megatron(text)
    path = Path(text)
    try:
        if text and path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            return preset(text)
        content = path.read_text()
        if path.suffix != ".json":
            return model_from_megatron(content, path.stem)
        return from_huggingface(json.loads(content), path.parent.name or path.stem)
    except SpecError:
        raise
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, numbers without an end
        raise SpecError("model", text, f"cannot be read: {error}") from None


def _document(p: RankedPlan) -> dict[str, Any]:
    e = p.estimate
    return {
        "layout": p.layout.to_dict(),
        "text": str(p.layout),
        "fits": p.fits,
        "step_s": e.step_s,
        "step_p10_s": e.step_p10_s,
        "step_p90_s": e.step_p90_s,
        "parts_s": dict(e.parts_s),
        "tokens_per_s_per_device": p.tokens_per_s_per_device,
        "mfu": p.mfu,
        "peak_bytes": list(e.peak_bytes),
        "peak_p90_bytes": e.peak_p90_bytes,
        "memory_parts_bytes": dict(e.memory_parts_bytes),
        "why": p.why,
    }


def _part(*names: str) -> Any:
    return lambda row: f"{100 * sum(row['parts_s'].get(n, 0.0) for n in names) / row['step_s']:.0f}"


COLUMNS = (
    Column("LAYOUT", lambda r: r["text"]),
    Column("STEP", lambda r: seconds(r["step_s"])),
    Column("P10-P90", lambda r: f"{seconds(r['step_p10_s'])}-{seconds(r['step_p90_s'])}"),
    Column("COMPUTE %", _part("compute", "host")),
    Column("TP %", _part("tp", "cp", "ep")),
    Column("BUBBLE %", _part("pp_bubble", "pp_transfer")),
    Column("DP %", _part("dp")),
    Column("OPT %", _part("optimizer")),
    Column("TOK/S/DEV", lambda r: f"{r['tokens_per_s_per_device']:.0f}"),
    Column("MFU %", lambda r: f"{100 * r['mfu']:.1f}"),
    Column("PEAK P90", lambda r: size(r["peak_p90_bytes"])),
    Column("MEMORY", lambda r: _largest(r["memory_parts_bytes"]), wide=True),
    Column("WHY", lambda r: r["why"] or "best"),
)


def _largest(parts: dict[str, int]) -> str:
    first = sorted(parts, key=lambda k: -parts[k])[:4]
    return ", ".join(f"{k} {size(parts[k])}" for k in first)
