"""What copies may take of nodes: who keeps what, what is promised to whom, and what is said where it does not fit."""

from __future__ import annotations

import random

import pytest

from suika.runtime.rooms import NodeMemory, Places, Rooms, Wish

ALONE = Wish({"a": 100}, {"a": 100})
PAIR = Wish({"a": 100, "b": 80}, {"a": 30, "b": 20})


def node(limit: int, available: int = 10_000) -> NodeMemory:
    return NodeMemory(100_000, available, limit)


def rooms(**memory: NodeMemory | None) -> Rooms:
    return Rooms(lambda: memory)


def test_a_job_on_one_node_is_kept_by_the_one_with_the_most_room() -> None:
    some = rooms(a=node(1000), b=node(300), c=node(900), d=node(900), e=node(5000, available=250))
    assert some.settle("j", ALONE, {}) == Places({"a": "c"})
    assert some.settle("j", ALONE, {"a": "b"}) == Places({"a": "b"}), "what has a keeper stays there"
    assert some.settle("j", ALONE, {"a": "b"}, bad=["b"]) == Places({"a": "c"})


def test_the_jobs_own_nodes_keep_for_each_other() -> None:
    some = rooms(a=node(1000), b=node(1000), c=node(9000))
    assert some.settle("j", PAIR, {}) == Places({"a": "b", "b": "a"})
    assert some.settle("j", PAIR, {"a": "c"}) == Places({"a": "b", "b": "a"})
    three = Wish(dict.fromkeys("abc", 50), {"a": 10, "b": 0, "c": 10})
    assert some.settle("j", three, {}) == Places({"a": "b", "c": "a"})


def test_a_stranger_keeps_what_the_jobs_own_nodes_have_no_room_for() -> None:
    some = rooms(a=node(1000), b=node(160 + 59), c=node(61))
    assert some.settle("j", PAIR, {}) == Places({"a": "c", "b": "a"})


@pytest.mark.parametrize("where", [{}, {"b": None}])
def test_a_node_that_is_away_or_does_not_say_keeps_nothing_of_strangers(where: dict[str, NodeMemory | None]) -> None:
    found = rooms(a=node(1000), **where).settle("j", ALONE, {})
    assert found.keepers == {}
    assert found.lacking == "all copies lie on a: there is no other node that is up and may keep them"


def test_a_node_that_is_being_emptied_keeps_nothing_of_strangers() -> None:
    some = rooms(a=node(1000), b=node(1000))
    some.avoided = lambda: {"b"}
    assert some.settle("j", ALONE, {"a": "b"}).keepers == {}
    some.avoided = lambda: {"a"}
    assert some.settle("j", PAIR, {}).keepers == {"a": "b", "b": "a"}, "the job itself is still on it"


def test_what_does_not_fit_is_said() -> None:
    some = rooms(a=node(1000), b=node(150))
    lacking = some.settle("j", ALONE, {}).lacking
    assert lacking == (
        "what lies on a alone has no second copy: b has room for 150 B of this job's copies, which need 200 B"
    )
    refused = some.settle("j", Wish({"b": 100}, {"b": 0}), {})
    said = "no copy is made: b has room for 150 B of this job's copies, which need 200 B"
    assert refused == Places(refused=said)
    assert rooms().settle("j", ALONE, {}).refused == "no copy is made: a is not up, or its holders fail"


def test_who_is_refused_has_what_its_holders_hold_and_no_more() -> None:
    """The job has left a, where it keeps one set yet, with b as its keeper, for c, which has no room."""
    some = rooms(a=node(300), b=node(300), c=node(300))
    assert some.settle("j", ALONE, {}).keepers == {"a": "b"}
    assert some.settle("k", Wish({"a": 51}, {"a": 0}), {}).refused is not None, "j is promised 200 of a's 300"
    some.hold("j", {"a": 100, "b": 100})
    assert some.settle("j", Wish({"c": 151}, {"c": 0}), {}).refused is not None
    others = Wish({"a": 100, "b": 100, "c": 150}, {"a": 0, "b": 0, "c": 0})
    assert some.settle("k", others, {}).refused is None
    more = Wish({"a": 101}, {"a": 0})
    assert some.settle("k", more, {}).refused is not None, "j still has 100 of a's 300"
    some.hold("j", {"a": 0, "b": 100})
    assert some.settle("k", more, {}).refused is None, "its set is gone"
    some.release("j")
    assert some.settle("k", Wish({"b": 150}, {"b": 0}), {}).refused is None


def test_what_was_promised_and_not_taken_yet_is_not_available_any_more() -> None:
    memory = {"a": node(10_000, available=500)}
    some = Rooms(lambda: memory)
    assert some.settle("j", Wish({"a": 200}, {"a": 0}), {}).refused is None
    assert some.settle("k", Wish({"a": 51}, {"a": 0}), {}).refused is not None
    some.hold("j", {"a": 200})
    memory["a"] = node(10_000, available=302)
    assert some.settle("k", Wish({"a": 51}, {"a": 0}), {}).refused is None, "302 less the 200 that j is to take yet"
    assert some.settle("j", Wish({"a": 200}, {"a": 0}), {}).refused is None, "its own 200 are room for itself"


def test_what_is_held_counts_though_nobody_promised_it() -> None:
    some = rooms(a=node(1000), b=node(1000))
    some.hold("old", {"a": 900, "b": 1})
    assert some.held_bytes() == {"a": 900, "b": 1}
    assert some.settle("j", Wish({"a": 51}, {"a": 0}), {}).refused is not None
    some.hold("old", {"b": 1})
    assert some.held_bytes() == {"b": 1}
    assert some.settle("j", Wish({"a": 51}, {"a": 0}), {}).refused is None
    assert some.limits() == {"a": 1000, "b": 1000}


@pytest.mark.parametrize("seed", range(5))
def test_no_node_is_ever_promised_more_than_it_allows(seed: int) -> None:
    """Jobs come, move and go at random, and their holders take what they were promised; no part of a job's state has
    both its copies on one node."""
    dice = random.Random(seed)
    limits = {name: dice.randrange(200, 2000) for name in "abcdef"}
    some = rooms(**{name: node(limit) for name, limit in limits.items()})
    kept: dict[str, Places] = {}
    num_refused = 0

    def reserved(name: str, job: str) -> int:
        return max(book.get(name, {}).get(job, 0) for book in (some._promised, some._held))

    for _ in range(300):
        job = dice.choice("uvwxyz")
        if dice.random() < 0.2:
            some.release(job)
            kept.pop(job, None)
            continue
        own = {name: dice.randrange(1, 200) for name in dice.sample("abcdef", dice.randrange(1, 4))}
        alone = {name: dice.randrange(num_bytes + 1) for name, num_bytes in own.items()}
        before = kept.get(job, Places()).keepers
        places = some.settle(job, Wish(own, alone), before)
        if places.refused is None:
            kept[job] = places
            assert all(node != keeper for node, keeper in places.keepers.items())
            assert places.lacking is not None or set(places.keepers) == {n for n, num in alone.items() if num}
            some.hold(job, {name: dice.randrange(reserved(name, job) + 1) for name in limits})
        else:
            num_refused += 1
            assert all(reserved(name, job) == some._held.get(name, {}).get(job, 0) for name in limits)
        for name, limit in limits.items():
            assert sum(reserved(name, each) for each in "uvwxyz") <= limit
    assert num_refused
