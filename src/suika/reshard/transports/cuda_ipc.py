"""Devices of one host that copy straight from each other's memory (CUDA IPC).

Only a fixed staging pool is ever shown, never live state: a handle covers the whole allocation it lies in, and memory
of expandable segments cannot be exported reliably. Each peer has slots of its own in the pool, so that one who is slow
holds up nobody else. The rule of `mapped.py` does the rest: the exporter reuses a slot, and may end, only after the
receiver has said that its copy is complete. Pool traffic inside a device runs at memory speed.

More than `NUM_SLOTS` pieces to one peer must be received in the order in which they were sent. All participants must
belong to one user and see all devices involved.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from suika.reshard.transports.base import TransportError
from suika.reshard.transports.lines import Exchange, Lines
from suika.reshard.transports.mapped import Mapped, Shown

SLOT_BYTES = 32 << 20
NUM_SLOTS = 4  # per peer


class _DevicePool:
    """This participant's staging memory, and the peers' pools as far as they have been opened. Bytes only.

    A storage is exported once per peer: torch counts the readers of each export, and frees none while one is left.
    """

    def __init__(self, peers: Sequence[int], device: torch.device, slot_bytes: int, num_slots: int) -> None:
        self.piece_bytes = slot_bytes
        self._device = device
        self._slots = {peer: torch.empty((num_slots, slot_bytes), dtype=torch.uint8, device=device) for peer in peers}
        self._free = {peer: list(range(num_slots)) for peer in peers}
        self._told: set[int] = set()  # peers that have this pool's handle
        self._opened: dict[int, torch.Tensor] = {}

    def show(self, peer: int, piece: torch.Tensor) -> Shown | None:
        if not self._free[peer]:
            return None
        slot = self._free[peer].pop()
        self._slots[peer][slot, : piece.numel()].copy_(piece)
        torch.cuda.current_stream(self._device).synchronize()  # the receiver's stream knows nothing of ours
        handle = None if peer in self._told else self._export(self._slots[peer])
        self._told.add(peer)
        return Shown(pickle.dumps((slot, piece.numel(), handle)), (), slot)

    def taken(self, peer: int, shown: Shown) -> None:
        assert isinstance(shown.kept, int)
        self._free[peer].append(shown.kept)

    def copy(self, peer: int, ticket: bytes, fds: Sequence[int], target: torch.Tensor) -> None:
        slot, num_bytes, handle = pickle.loads(ticket)  # from a process of the same user, see `lines.py`
        if handle is not None:
            self._opened[peer] = self._open(*handle)
        target.copy_(self._opened[peer][slot, :num_bytes])
        torch.cuda.current_stream(self._device).synchronize()  # copied, and only then acknowledged

    def _export(self, pool: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[Any, ...]]:
        """(device's uuid, shape, torch's handle). The first entry of a handle is the exporter's number of the device,
        which another process may count differently."""
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        return uuid, tuple(pool.shape), pool.untyped_storage()._share_cuda_()

    def _open(self, uuid: str, shape: tuple[int, ...], handle: tuple[Any, ...]) -> torch.Tensor:
        device = _number_of(uuid)
        storage = torch.UntypedStorage._new_shared_cuda(device, *handle[1:])
        flat = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device))
        return flat.set_(storage, 0, shape)  # type: ignore[call-overload]


class CudaIpc(Mapped):
    """Participant `rank`, whose buffers are on `device`, among `neighbours` on the same host. Raises `ApartError`
    like `Shared`. Keep it until an all-gather has come back after the last message: peers read its pool."""

    def __init__(
        self,
        rank: int,
        neighbours: Sequence[int],
        exchange: Exchange,
        device: torch.device,
        timeout_s: float = 60.0,
        slot_bytes: int = SLOT_BYTES,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        torch.cuda.set_device(device)
        pool = _DevicePool(neighbours, device, slot_bytes, num_slots)
        super().__init__(rank, Lines.open(rank, neighbours, exchange), pool, timeout_s)


def _number_of(uuid: str) -> int:
    """This process's number of the device with `uuid`."""
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == uuid:
            return number
    raise TransportError(f"this process does not see device {uuid}: make all devices of the host visible to every rank")
