"""How a move's bytes travel between its participants, by where their state lies.

On CPUs: common memory inside a node, gloo between nodes. On GPUs: CUDA IPC inside a node; between nodes NCCL, if every
participant has a device of its own (NCCL refuses two on one), else gloo through host memory. Words go over gloo always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from suika.reshard.buffers import Make
from suika.reshard.transports import memfd
from suika.reshard.transports.base import Transport
from suika.reshard.transports.cuda_ipc import CudaIpc
from suika.reshard.transports.gloo import Gloo
from suika.reshard.transports.inprocess import Hub
from suika.reshard.transports.mixed import Mixed
from suika.reshard.transports.nccl import Nccl
from suika.reshard.transports.shared import Shared
from suika.runtime.groups import build_nccl_group

Wire = Literal["none", "gloo", "nccl"]


@dataclass(frozen=True)
class Way:
    """`make` gives memory for new buffers that this transport can move into."""

    transport: Mixed
    wire: Wire
    make: Make
    nccl: dist.ProcessGroup | None = None

    def close(self) -> None:
        """Let go of what was opened for the move."""
        self.transport.close()
        if self.nccl is not None:
            self.nccl.shutdown()


def wire_between(kind: str, nodes: Sequence[int], places: Sequence[str], nccl: bool) -> Wire:
    """What carries bytes between nodes. `kind`: "cpu" or "cuda"; `nodes[i]`, `places[i]`: node and physical device of
    participant i; `nccl`: whether everybody has it."""
    if len(nodes) == 1:
        return "none"
    if kind != "cuda" or len(set(nodes)) == 1 or not nccl or len(set(places)) < len(places):
        return "gloo"
    return "nccl"


def open_way(
    group: dist.ProcessGroup | None,
    nodes: Sequence[int],
    device: torch.device,
    store: dist.Store,
    name: str,
    timeout_s: float,
) -> Way:
    """The way of a move whose participants are the ranks of `group` (None: this one alone), each with its state on
    `device`. All participants call it together; `name` is used once."""
    words = Gloo(group) if group is not None else Hub(1).transports()[0]
    if device.type == "cpu":
        wire = wire_between("cpu", nodes, [], False)
        return Way(Mixed.of(words, nodes, partial(Shared, timeout_s=timeout_s)), wire, memfd.empty)
    said = [word.decode().partition(" ") for word in words.all_gather(_place(device).encode())]
    places = [f"{node} {place}" for node, (_, _, place) in zip(nodes, said, strict=True)]
    wire = wire_between("cuda", nodes, places, all(able == "nccl" for able, _, _ in said))
    carrier: Transport = words
    nccl = None
    if wire == "nccl":
        nccl = build_nccl_group(store, f"{name}/nccl", words.rank, words.size, timeout_s, device)
        carrier = Nccl(nccl, words, device, timeout_s)
    near = partial(CudaIpc, device=device, timeout_s=timeout_s)
    return Way(Mixed.of(carrier, nodes, near), wire, partial(_on_device, device), nccl)


def _on_device(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def _place(device: torch.device) -> str:
    """Whether NCCL is at hand, and the physical device."""
    able = "nccl" if dist.is_nccl_available() else "none"
    return f"{able} {torch.cuda.get_device_properties(device).uuid}"
