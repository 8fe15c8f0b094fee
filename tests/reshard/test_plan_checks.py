"""Plans that would hang, lose or duplicate bytes are caught before anything starts."""

from __future__ import annotations

from collections.abc import Callable

import labels
import pytest

from suika.core.cluster import Cluster, Node
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.reshard.links import Links
from suika.reshard.moveplan import plan_move
from suika.reshard.rounds import Message, check_order, messages_of, streams_of
from suika.reshard.routes import Demand, Flow, check_flows, route
from suika.reshard.state import JobShape

CLUSTER = Cluster((Node("a", 2, "cpu"), Node("b", 2, "cpu"), Node("c", 1, "cpu")))
LINKS = Links(CLUSTER, CLUSTER.devices)
# Participants 0, 1 on node a; 2, 3 on b; 4 on c. Group 0 goes to a whole node, group 1 has two holders, 2 stays put.
DEMANDS = [Demand((0,), (2, 3), 4096), Demand((0, 4), (3, 4, 1), 1000), Demand((2,), (2,), 64)]


def test_one_copy_per_node_and_the_rest_inside() -> None:
    flows, load = route(DEMANDS, LINKS, split_bytes=1024)
    check_flows(DEMANDS, flows)
    across = [flow for flow in flows if LINKS.node[flow.src] != LINKS.node[flow.dst]]
    assert sum(flow.stop - flow.start for flow in across if flow.group == 0) == 4096
    assert {flow.dst for flow in across if flow.group == 0} == {2, 3}, "both devices of the node take part in receiving"
    assert all(flow.src == 0 for flow in flows if flow.group == 1 and flow.dst == 1), "a holder on the node sends"
    assert load.worst_s == max(
        max(load.out_s[True]), max(load.in_s[True]), max(load.out_s[False]), max(load.in_s[False])
    )


def test_the_less_loaded_owner_sends() -> None:
    demands = [Demand((0,), (2,), 10_000), Demand((0, 4), (3,), 1000)]
    flows, _ = route(demands, LINKS, split_bytes=1 << 20)
    assert [flow.src for flow in flows if flow.group == 1] == [4]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda flows: flows[:-1], "does not get all|that it does not receive"),
        (lambda flows: [*flows, flows[0]], "twice or out of order"),
        (lambda flows: [flow._replace(src=3) if flow.hop == 0 else flow for flow in flows], "without having it"),
        (
            lambda flows: [f._replace(src=f.dst, dst=f.src) if f.hop else f for f in flows],
            "twice|forwards|does not get",
        ),
        (lambda flows: [*flows, Flow(0, 2, 0, 2, 0, 64)], "bytes for nobody"),
    ],
)
def test_wrong_flows_are_caught(spoil: Callable[[list[Flow]], list[Flow]], problem: str) -> None:
    flows, _ = route(DEMANDS, LINKS, split_bytes=1024)
    with pytest.raises(AssertionError, match=problem):
        check_flows(DEMANDS, spoil(flows))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda messages: messages[:-1], "not sent completely"),
        (lambda messages: [messages[1], messages[0], *messages[2:]], "out of order"),
        (lambda messages: [m._replace(round=0) for m in messages], "twice in a round"),
    ],
)
def test_wrong_orders_are_caught(spoil: Callable[[list[Message]], list[Message]], problem: str) -> None:
    streams = streams_of([Flow(0, 0, 1, 0, 0, 100), Flow(0, 2, 1, 1, 0, 64), Flow(1, 1, 3, 0, 0, 100)])
    messages = messages_of(streams, chunk_bytes=32)
    check_order(streams, messages)
    with pytest.raises(AssertionError, match=problem):
        check_order(streams, spoil(messages))


def test_rounds_are_few_and_forwarding_comes_last() -> None:
    """A full exchange between n participants takes n - 1 rounds with one chunk each: the colouring is not wasteful."""
    n = 6
    flows = [Flow(0, a, b, a, 0, 64) for a in range(n) for b in range(n) if a != b]
    flows.append(Flow(1, 1, 2, 0, 0, 64))
    streams = streams_of(flows)
    messages = messages_of(streams, chunk_bytes=64)
    last_arrival = max(m.round for m in messages if streams[m.stream].hop == 0)
    assert n - 2 <= last_arrival < 2 * (n - 1)
    assert all(m.round > last_arrival for m in messages if streams[m.stream].hop == 1)


def test_every_participant_derives_the_same_plan() -> None:
    shape = JobShape(ModelSpec("m", "llama", 2, 12, 12, 6, 12, head_dim=2), 4, "fp32")
    old, new = (
        labels.plan(shape, layout, CLUSTER.devices[: layout.num_ranks]) for layout in (Layout(tp=2), Layout(dp=3))
    )
    one, other = (plan_move(shape, old, new, CLUSTER) for _ in range(2))
    assert one.digest == other.digest
    assert (one.streams, one.messages) == (other.streams, other.messages)
    assert one.digest != plan_move(shape, new, old, CLUSTER).digest
