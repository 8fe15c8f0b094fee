"""What a resize would move, on which links, for how long and with how much memory, before anyone acts on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from suika.core.cluster import Cluster, Device
from suika.core.errors import SpecError
from suika.core.job import JobSpec
from suika.core.plan import Plan
from suika.core.snapshot import Option
from suika.reshard.assignment import assign
from suika.reshard.links import Links
from suika.reshard.memory import peaks
from suika.reshard.modes import keep_needs, lean_needs
from suika.reshard.moveplan import MovePlan, plan_move
from suika.reshard.pieces import lean_peaks, pieces_of
from suika.reshard.predict import pace_of, predict_move
from suika.reshard.state import JobShape

HOST = "cpu"  # the device type whose state lies in host memory


def preview_resize(
    spec: JobSpec, old: Plan, free: Sequence[Device], options: Iterable[Option], cluster: Cluster
) -> dict[str, Any]:
    """The move of a job under `old` to the best of `options` that fits on its own devices and the `free` ones, placed
    for the least bytes. Bytes are exact and times predicted; the scheduler may decide on other devices, since it weighs
    the other jobs too.

    `modes`: memory with both states side by side (`keep`) and piece by piece (`lean`; of state in host memory only):
    each device's peak, and what each node must give beyond what the job holds there now. The nodes decide when the
    move is prepared: side by side where every one of them has that, else piece by piece, else not at all. Raises
    `SpecError` when no option fits on the devices now.
    """
    candidates = (*old.devices, *free)
    fitting = [option for option in options if option.num_devices <= len(candidates)]
    if not fitting:
        raise SpecError("resize", spec.name, f"only {len(candidates)} devices are its own or free", "it would wait")
    layout = min(fitting, key=lambda option: (option.step_s, option.num_devices)).layout.resolve(spec.model)
    shape = JobShape.of(spec)
    devices = assign(shape, old, layout, candidates, cluster)
    new = Plan.checked(layout, devices, spec.model, spec.global_batch, spec.sequence_length, cluster)
    move = plan_move(shape, old, new, cluster, chunk_bytes=pace_of(cluster).chunk_bytes)
    predicted = predict_move(shape, old, new, cluster, pace_of(cluster))
    return {
        "dry_run": True,
        "old": old.to_dict(),
        "new": new.to_dict(),
        "moved_bytes": move.moved_bytes,
        "network_bytes": move.network_bytes,
        "resident_bytes": move.resident_bytes,
        "predicted_pause_s": predicted.pause_s,
        "predicted_release_s": predicted.release_s,
        "links": _links(move),
        "modes": _modes(move, cluster),
    }


def _modes(move: MovePlan, cluster: Cluster) -> dict[str, Any]:
    """Peak and need of each mode that the move can take."""
    names, links = [str(device) for device in move.participants], Links(cluster, move.participants)
    keep = [peak.keep for peak in peaks(move)]
    found = {"keep": {"peak_bytes": dict(zip(names, keep, strict=True)), "needed_bytes": keep_needs(move, links)}}
    if all(cluster.node_of[device.node].device_type == HOST for device in move.participants):
        lean = dict(zip(names, lean_peaks(pieces_of(move, links)), strict=True))
        found["lean"] = {"peak_bytes": lean, "needed_bytes": lean_needs(move, links)}
    return found


def _links(move: MovePlan) -> list[dict[str, Any]]:
    """Bytes from device to device, the busiest first."""
    sent: dict[tuple[Device, Device], int] = defaultdict(int)
    for stream in move.streams:
        sent[move.participants[stream.src], move.participants[stream.dst]] += stream.num_bytes
    rows = [{"source": str(a), "target": str(b), "network": a.node != b.node, "bytes": n} for (a, b), n in sent.items()]
    return sorted(rows, key=lambda row: (-row["bytes"], row["source"], row["target"]))
