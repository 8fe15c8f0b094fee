"""Process groups come and go without a trace, beside others that are in use."""

from __future__ import annotations

import gc
import os

import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import distributed_c10d as c10d
from twins import job, llama, text, trainer

from suika.core.layout import Layout
from suika.core.mesh import Mesh
from suika.runtime.groups import build_groups, destroy


def test_groups_follow_the_mesh_whatever_its_order() -> None:
    layout = Layout(tp=2, pp=2, dp=2)

    def body(rank: int, store: dist.Store) -> bool:
        for number, order in enumerate((("dp", "pp", "cp", "tp"), ("pp", "tp", "cp", "dp"))):
            mesh = Mesh(layout, order)
            groups = build_groups(store, f"g{number}", mesh, rank, 30)
            place = mesh.coordinate(rank)
            assert groups.world is not None
            assert (groups.world.rank(), groups.world.size()) == (rank, 8)
            for axis in ("tp", "pp", "dp"):
                group = getattr(groups, axis)
                assert (group.rank(), group.size()) == (getattr(place, axis), 2)
            assert groups.ends is not None
            assert groups.ends.rank() == place.pp
            destroy(groups)
        return True

    assert all(run_ranks(8, body))


def test_replicas_are_in_one_order_and_shared_out_to_experts() -> None:
    """dp 2 x cp 2 with the cp axis outermost: replica r is (dp, cp) = divmod(r, 2); neighbours share experts out."""
    layout = Layout(dp=2, cp=2, ep=2)

    def body(rank: int, store: dist.Store) -> None:
        mesh = Mesh(layout, ("cp", "dp", "pp", "tp"))
        groups, place = build_groups(store, "g", mesh, rank, 30), mesh.coordinate(rank)
        replica = place.dp * 2 + place.cp
        assert groups.dp is not None
        assert (groups.dp.rank(), groups.dp.size()) == (replica, 4)
        assert groups.cp is not None
        assert (groups.cp.rank(), groups.cp.size()) == (place.cp, 2)
        assert groups.ep is not None
        assert (groups.ep.rank(), groups.ep.size()) == (replica % 2, 2)
        assert groups.expert_dp is not None
        assert (groups.expert_dp.rank(), groups.expert_dp.size()) == (replica // 2, 2)
        destroy(groups)

    run_ranks(4, body)


def test_middle_stages_have_no_ends_and_axes_of_one_no_group() -> None:
    def body(rank: int, store: dist.Store) -> tuple[bool, ...]:
        groups = build_groups(store, "g", Mesh(Layout(pp=3)), rank, 30)
        return tuple(group is not None for group in (groups.world, groups.tp, groups.pp, groups.dp, groups.ends))

    first, middle, last = run_ranks(3, body)
    assert first == last == (True, False, True, False, True)
    assert middle == (True, False, True, False, False)


def test_twenty_generations_leave_nothing_behind() -> None:
    """B56: groups, threads, descriptors and registered names after each of 20 builds with a step each; flat from the
    third on."""
    spec = job(llama(layers=2), "fp32")
    layouts = (Layout(tp=2, dp=2, micro_batch=4), Layout(pp=2, dp=2, micro_batch=2))
    text()

    def body(rank: int, store: dist.Store) -> list[tuple[int, int, int]]:
        counts = []
        for generation in range(20):
            program = trainer(spec, layouts[generation % 2], rank, store, f"generation-{generation}")
            groups = program.groups
            program.bind(program.initialise())
            program.step(())
            del program
            destroy(groups)
            del groups
            gc.collect()
            counts.append(
                (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(c10d._world.pg_names))
            )
        return counts

    for counts in run_ranks(4, body, 90):
        assert all(groups == 0 for _, _, groups in counts)
        for threads, descriptors, _ in counts[3:]:
            assert threads <= counts[2][0] + 1, counts
            assert descriptors <= counts[2][1] + 1, counts
