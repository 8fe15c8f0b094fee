"""The devices of a node: CPU devices as many as asked for, NVIDIA devices as NVML finds them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from suika.core.device_names import of_driver
from suika.core.errors import SpecError, require

IDLE_BYTES = 600 << 20  # what a device without any process may hold: driver and firmware


class Inventory(Protocol):
    device_type: str
    num_devices: int
    checks: bool  # whether `dirty` can tell
    visible: str  # environment variable that names the devices a program may use; empty: there is none

    def dirty(self, own: Collection[int]) -> dict[int, str]:
        """Devices that no process of `own` (pids) uses and that are not idle, with the reason."""
        ...


class CpuDevices:
    """`num_devices` slots on the CPU. What a process held is gone with it: none is ever dirty."""

    checks = False
    visible = ""

    def __init__(self, num_devices: int, device_type: str = "cpu") -> None:
        require(0 < num_devices <= 1024, "devices", num_devices, "must be between 1 and 1024")
        self.num_devices = num_devices
        self.device_type = device_type

    def dirty(self, own: Collection[int]) -> dict[int, str]:
        return {}


class NvidiaDevices:
    """All devices of this machine. A device with memory in use and no live process of ours is dirty."""

    checks = True
    visible = "CUDA_VISIBLE_DEVICES"

    def __init__(self) -> None:
        """Raises `SpecError` without NVML or devices."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:
            raise SpecError("devices", "nvidia", f"NVML does not answer: {error}", "install nvidia-ml-py") from None
        self._nvml = pynvml
        self.num_devices = pynvml.nvmlDeviceGetCount()
        require(self.num_devices > 0, "devices", "nvidia", "this machine has none")
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        self.device_type = of_driver(name if isinstance(name, str) else name.decode())

    def dirty(self, own: Collection[int]) -> dict[int, str]:
        found = {}
        for index in range(self.num_devices):
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            users = set()
            with suppress(self._nvml.NVMLError):
                users = {process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            if not users.isdisjoint(own):
                continue
            used = self._nvml.nvmlDeviceGetMemoryInfo(handle).used
            if users:
                found[index] = f"processes {sorted(users)} of others use it"
            elif used > IDLE_BYTES:
                found[index] = f"{used >> 20} MiB are in use by nobody"
        return found


def with_descendants(pids: Collection[int]) -> set[int]:
    """`pids` and all that they started: a command's programs are children of ours."""
    found, new = set(pids), list(pids)
    while new:
        with suppress(OSError):
            folder = Path(f"/proc/{new[-1]}/task")
            lists = [(task / "children").read_text().split() for task in folder.iterdir()]
            children = {int(pid) for pids_ in lists for pid in pids_} - found
            new.pop()
            new += children
            found |= children
            continue
        new.pop()  # it is gone
    return found
