"""The tightest of the kernel's and all control groups' words about memory counts, in either version of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from suika.core.host_memory import HostMemory, host_memory

GIB = 1 << 30


def host(folder: Path, groups: str, **files: object) -> HostMemory:
    """A host of 64 GiB, 40 available. Of `files` `__` in a name is a slash."""
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    lines = ("MemTotal:  67108864 kB", "MemFree:  1024 kB", "MemAvailable:  41943040 kB", "HugePages_Total:  0")
    (proc / "meminfo").write_text("\n".join(lines) + "\n")
    (proc / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        path = folder / "cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return host_memory(proc, folder / "cgroup")


def test_without_groups_it_is_the_kernels_word(tmp_path: Path) -> None:
    assert host(tmp_path, "") == HostMemory(64 * GIB, 40 * GIB)


def test_a_group_above_may_be_the_tightest(tmp_path: Path) -> None:
    files = {
        "jobs__one__memory_dot_max": "max",
        "jobs__memory_dot_max": 8 * GIB,
        "jobs__memory_dot_current": 3 * GIB,
        "jobs__memory_dot_stat": f"anon 5\ninactive_file {GIB}\nactive_file 7",
    }
    assert host(tmp_path, "0::/jobs/one\n", **files) == HostMemory(8 * GIB, 6 * GIB)


def test_version_1_and_a_container_that_does_not_see_its_hosts_folders(tmp_path: Path) -> None:
    files = {
        "memory__memory_dot_limit_in_bytes": 4 * GIB,
        "memory__memory_dot_usage_in_bytes": 5 * GIB,
        "memory__memory_dot_stat": f"total_inactive_file {GIB // 2}",
    }
    found = host(tmp_path, "5:devices:/a\n4:memory:/machine/elsewhere\n0::/\n", **files)
    assert found == HostMemory(4 * GIB, 0), "more in use than allowed: nothing is left"


@pytest.mark.parametrize("limit", ["max", str((1 << 63) - 4096), "nonsense"])
def test_a_group_without_a_limit_says_nothing(tmp_path: Path, limit: str) -> None:
    files = {"memory_dot_max": limit, "memory_dot_current": GIB}
    assert host(tmp_path, "0::/\n", **files) == HostMemory(64 * GIB, 40 * GIB)


def test_this_host() -> None:
    found = host_memory()
    assert 0 < found.available_bytes < found.total_bytes
