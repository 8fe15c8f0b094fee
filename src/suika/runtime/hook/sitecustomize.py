"""Put first on PYTHONPATH by `suika exec`: profiles a PyTorch program that knows nothing of it, torchrun's ranks too.

Standard library and the program's own torch only: Suika need not be installed where the program runs. A step ends when
the program's first optimizer has stepped. Steps SKIP to SKIP + STEPS run under one Kineto window; the collective log is
c10d's flight recorder. What was seen goes to one JSON file per process. Nothing here may break the program: a failure
of the profiler is noted in the file and the program runs on.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from typing import Any


def _number(name: str, default: int) -> int:
    """A whole number of the environment, which is the program's own: what is none counts as `default`."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


FOLDER = os.environ.get("SUIKA_EXEC_DIR")
SKIP, STEPS = _number("SUIKA_EXEC_SKIP", 5), _number("SUIKA_EXEC_STEPS", 3)


class Recorder:
    """Step times, and the window's operations and collectives."""

    def __init__(self) -> None:
        self.clock: int | None = None  # the optimizer whose steps count
        self.ends_s: list[float] = []
        self.errors: list[str] = []
        self.window: dict[str, Any] | None = None
        self.profile: Any = None
        self.profiler_s, self.precision, self.first_record = 0.0, "fp32", 0
        atexit.register(self.end)

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """After every optimizer step in this process."""
        try:
            if self.clock is None:
                self.clock = id(optimizer)
                kinds = {str(p.dtype) for group in optimizer.param_groups for p in group["params"]}
                known = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float64": "fp64"}
                self.precision = next((known[k] for k in kinds if k in known), "fp32")
            if id(optimizer) != self.clock:
                return
            self.ends_s.append(time.perf_counter())
            began = time.perf_counter()
            if len(self.ends_s) == SKIP:
                self.open()
            elif self.profile is not None and len(self.ends_s) == SKIP + STEPS:
                self.close()
            self.profiler_s += time.perf_counter() - began
        except Exception as error:
            self.errors.append(repr(error))
            self.profile = None

    def open(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        self.first_record = len(flight_records())
        self.profile = profile(activities=kinds, record_shapes=True)
        self.profile.__enter__()
        self.ends_s[-1] = time.perf_counter()  # the window's first step starts here

    def close(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall_s, steps = time.perf_counter() - self.ends_s[SKIP - 1], len(self.ends_s) - SKIP
        profile, self.profile = self.profile, None
        profile.__exit__(None, None, None)
        if not steps:
            return
        on_device = torch.cuda.is_available()
        totals: dict[tuple[str, str], list[Any]] = {}
        for event in profile.events():
            seconds = (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6
            if event.name.startswith(("gloo:", "nccl:")):  # a backend's own note: it runs beside the thread that waits
                seconds = event.time_range.elapsed_us() / 1e6
            if seconds <= 0:
                continue
            shapes = [list(s) for s in event.input_shapes or [] if _is_shape(s)]
            row = totals.setdefault((event.name, json.dumps(shapes)), [0, 0.0])
            row[0] += 1
            row[1] += seconds
        ops = [[name, json.loads(shapes), *row] for (name, shapes), row in totals.items()]
        log = flight_records()[self.first_record :]
        self.window = {"first": SKIP, "steps": steps, "wall_s": wall_s, "ops": ops, "collectives": log}
        self.write()

    def end(self) -> None:
        """At exit. A window that is still open is closed first, with the steps it has: torch crashes if it ends with
        one open."""
        try:
            if self.profile is not None:
                self.close()
        except Exception as error:
            self.errors.append(repr(error))
        self.write()

    def write(self) -> None:
        """Once after the window and once at exit."""
        if not self.ends_s or FOLDER is None:
            return
        document = {
            "rank": _number("RANK", 0),
            "world_size": _number("WORLD_SIZE", 1),
            "pid": os.getpid(),
            "precision": self.precision,
            "step_s": [b - a for a, b in zip(self.ends_s, self.ends_s[1:], strict=False)],
            "window": self.window,
            "profiler_s": self.profiler_s,
            "errors": self.errors,
        }
        path = os.path.join(FOLDER, f"rank-{document['rank']}-{document['pid']}.json")
        with open(path + ".part", "w") as file:
            json.dump(document, file)
        os.replace(path + ".part", path)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, (list, tuple)) and all(isinstance(n, int) for n in shape)


def flight_records() -> list[list[Any]]:
    """The collective log so far: [name, bytes, group size, milliseconds or None] per record."""
    import pickle

    try:
        from torch._C import _distributed_c10d as c10d

        dump = pickle.loads((getattr(c10d, "_dump_fr_trace", None) or getattr(c10d, "_dump_nccl_trace"))())  # noqa: B009
    except Exception:
        return []
    sizes = {"Double": 8, "Long": 8, "Half": 2, "BFloat16": 2, "Byte": 1, "Char": 1, "Bool": 1}
    groups = {name: len(json.loads(group.get("ranks") or "[]")) for name, group in dump.get("pg_config", {}).items()}
    rows = []
    for entry in dump.get("entries", []):
        num_bytes = 0
        for shape, kind in zip(entry.get("input_sizes", []), entry.get("input_dtypes", []), strict=False):
            count = 1
            for n in shape:
                count *= n
            num_bytes += count * sizes.get(kind, 4)
        name = entry.get("profiling_name", "?").split(":", 1)[-1]
        group = entry.get("process_group", ("0", ""))
        size = next((groups[str(key)] for key in group if groups.get(str(key))), _number("WORLD_SIZE", 1))
        rows.append([name, num_bytes, size, entry.get("duration_ms")])
    return rows


class _AfterOptimizer(importlib.abc.MetaPathFinder):
    """Arms the recorder right after `torch.optim.optimizer` has been loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            module.register_optimizer_step_post_hook(Recorder().stepped)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _chain() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if FOLDER:
    sys.meta_path.insert(0, _AfterOptimizer())
_chain()
