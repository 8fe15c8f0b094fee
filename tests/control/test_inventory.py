"""A node's devices, and which of them are not clean. NVML is a stand-in with its published interface."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from suika.agent.condition import Condition
from suika.agent.inventory import CpuDevices, NvidiaDevices, with_descendants
from suika.agent.news import News
from suika.agent.orders import Orders
from suika.agent.outbox import Outbox
from suika.agent.rules import Rules
from suika.core.errors import SpecError

MIB = 1 << 20


class NVML:
    """Two devices; `users` are the pids on each, `used` its memory."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        self.users: list[list[int]] = [[], []]
        self.used = [100 * MIB, 100 * MIB]

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA A100-SXM4-80GB"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self.users[handle]]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=self.used[handle])


def test_a_device_in_use_by_nobody_of_ours_is_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = NVML()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    devices = NvidiaDevices()
    assert (devices.num_devices, devices.device_type) == (2, "A100-80GB")
    assert devices.dirty([]) == {}
    nvml.users, nvml.used = [[7], [8]], [70_000 * MIB, 900 * MIB]
    assert devices.dirty([7]) == {1: "processes [8] of others use it"}
    nvml.users = [[], []]
    assert devices.dirty([7]) == {0: "70000 MiB are in use by nobody", 1: "900 MiB are in use by nobody"}


def test_without_a_driver_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(SpecError, match="nvidia-ml-py"):
        NvidiaDevices()


def test_emulated_devices_are_never_dirty() -> None:
    assert CpuDevices(4).dirty([1]) == {}
    with pytest.raises(SpecError):
        CpuDevices(0)


def test_what_a_process_of_ours_started_is_ours() -> None:
    nap = "import subprocess, time; subprocess.Popen(['/bin/sleep', '60']); print(1, flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", nap], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        found = with_descendants([child.pid, 2**22 + 1])  # the second is nobody
        assert len(found) == 3
        assert found == with_descendants({os.getpid()}) & found | {2**22 + 1}
    finally:
        for pid in with_descendants([child.pid]):
            os.kill(pid, 9)
        child.wait()


def test_a_dirty_device_is_looked_at_again_until_it_is_clean() -> None:
    found = {0: "4 MiB are in use by nobody"}
    inventory = SimpleNamespace(dirty=lambda own: dict(found), checks=True, num_devices=1, device_type="A100")
    said: list[dict[str, str]] = []
    outbox = Outbox(lambda number: None)
    outbox.connect(lambda frame: said.append(frame["m"]["dirty"]), 0, resumes=False)
    condition = Condition(inventory, None, outbox)
    condition.tell()
    condition.look_again()
    found.clear()
    condition.look_again()
    condition.look_again()
    assert said == [{"0": "4 MiB are in use by nobody"}, {}]


def test_signs_of_life_do_not_wait_behind_an_end_that_waits_for_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("suika.agent.condition.CLEAN_WAIT_S", 1.0)
    found = {0: "4 MiB are in use by nobody"}
    inventory = SimpleNamespace(dirty=lambda own: dict(found), checks=True, num_devices=2, device_type="A100")
    said: list[str] = []
    outbox = Outbox(lambda number: None)
    outbox.connect(lambda frame: said.append(frame["m"]["event"]) if "m" in frame else None, 0, resumes=False)
    outbox.tell({"event": "hello", "processes": [], "asked": 1})  # it has told everything
    news = News(True, Condition(inventory, None, outbox), outbox)
    teller = threading.Thread(target=news.run)
    teller.start()
    forks = SimpleNamespace(order=lambda order: None)
    orders = Orders("n0", tmp_path, Rules(), forks, news.roll, outbox, print)
    orders.carry_out({"do": "ping", "processes": ["k.1.n0/1"]})
    for index in range(3):
        news.hear({"event": "exit", "process": f"j.1.n0/{index}", "code": 0})
    news.hear({"event": "message", "process": "k.1.n0/1", "message": {"say": "pong"}})
    assert said == ["hello", "alive"]
    began_s = time.monotonic()
    news.end()
    teller.join(10)
    assert said == ["hello", "alive", *["devices", "exit"] * 3]
    assert time.monotonic() - began_s < 2.0, "a device that is said to be dirty is waited for once"
