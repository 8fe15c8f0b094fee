"""Which copies in memory count, and which are of a past that the job has given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from suika.runtime.copies import Copies
from suika.runtime.copysets import CopySets, Lineage, is_name, key_of, name_of
from suika.runtime.rooms import Rooms

from .conftest import plan, spec

META = {"plan": plan("tp=2,pp=1,dp=1", "a0 b0", spec()).to_dict(), "records": {}}


def held(generation: int, step: int, rank: int, alone: int = 0, copied: bool = False) -> dict[str, Any]:
    about = {"generation": generation, "step": step, "rank": rank, "copied": copied, "alone": alone}
    return about | {"num_bytes": 10, "stall_s": 0.5 * rank, "meta": META if rank == 0 else {}}


def whole(sets: CopySets, generation: int, step: int) -> None:
    sets.take_in("ha", held(generation, step, 0))
    assert sets.take_in("hb", held(generation, step, 1)) is not None


def keys(sets: CopySets) -> list[tuple[int, int]]:
    return [one.key for one in sets]


def test_a_set_counts_once_what_lies_alone_is_held_twice() -> None:
    sets = CopySets()
    for message in (held(1, 5, 0, alone=2), held(1, 5, 1, alone=1), held(1, 5, 0, copied=True)):
        assert sets.take_in("ha", message) is None
        assert sets.newest is None
    one = sets.take_in("hb", held(1, 5, 1, copied=True))
    assert one is not None
    assert (one.name, one.num_bytes, one.stall_s, one.holders) == ("memory:1/5", 40, 0.5, {"ha", "hb"})
    assert is_name(one.name)
    assert sets.take_in("hb", held(1, 5, 1, copied=True)) is None, "said again: no news"
    assert one.num_bytes == 40


def test_copies_alone_are_whole_without_a_word_of_the_first_holder() -> None:
    """Who comes later, and finds one holder of two, must learn from it what the whole is."""
    sets = CopySets()
    for rank in (0, 1):
        sets.take_in("hb", held(1, 5, rank, copied=True))
    (one,) = sets
    assert one.plan is not None
    assert (one.copied, one.complete) == ({0: "hb", 1: "hb"}, False)


def test_a_newer_set_drops_older_ones_and_late_words_of_them() -> None:
    sets = CopySets()
    whole(sets, 1, 5)
    sets.take_in("ha", held(1, 10, 0))
    assert keys(sets) == [(1, 10), (1, 5)]
    assert sets.drop_unfinished() == [(1, 10)]
    for rank in (0, 1):
        assert sets.take_in("ha", held(1, 10, rank)) is None, "said before it was dropped: it is not there any more"
    assert keys(sets) == [(1, 5)]
    whole(sets, 2, 15)
    assert sets.take_in("ha", held(1, 10, 0)) is None
    assert keys(sets) == [(2, 15)]
    assert sets.rests_on("hb")
    assert not sets.rests_on("hc")


def test_who_starts_from_less_gives_up_what_was_ahead() -> None:
    """Generation 1 had come to step 50 in memory; the job went back to its snapshot of step 40."""
    sets = CopySets()
    whole(sets, 1, 50)
    assert sets.keep_to(Lineage(since=2)) == [(1, 50)]
    assert sets.newest is None
    assert sets.take_in("ha", held(1, 50, 0)) is None, "nor is it taken again from a holder that comes back"
    assert keys(sets) == []
    whole(sets, 3, 45)
    assert sets.newest == (3, 45), "moved on since"


def test_the_set_that_a_job_was_started_from_stays_its_own() -> None:
    sets = CopySets()
    whole(sets, 1, 45)
    sets.take_in("ha", held(1, 50, 0))
    assert sets.keep_to(Lineage(since=2, source=(1, 45))) == [(1, 50)]
    assert sets.newest == (1, 45)
    sets.take_in("ha", held(2, 46, 0))
    assert sets.drop_unfinished() == [(2, 46)]
    assert keys(sets) == [(1, 45)]


def test_a_job_that_waits_takes_the_step_that_it_was_promised_or_a_later_one() -> None:
    sets = CopySets()
    sets.keep_to(Lineage(since=3, step=70))
    for key in ((2, 70), (2, 75), (3, 65)):
        assert sets.take_in("ha", held(*key, 0)) is None
    assert keys(sets) == []
    whole(sets, 3, 70)
    whole(sets, 3, 75)
    assert keys(sets) == [(3, 75)]


def test_a_job_that_waits_takes_what_it_was_started_from_only_if_it_has_come_no_further() -> None:
    sets = CopySets()
    sets.keep_to(Lineage(since=3, source=(1, 45), step=50))
    assert sets.take_in("ha", held(1, 45, 0)) is None
    assert keys(sets) == [], "the state of step 50 may come yet: to start from less would lose it"
    sets.keep_to(Lineage(since=3, source=(1, 45), step=45))
    whole(sets, 1, 45)
    assert sets.newest == (1, 45)


def test_a_name_says_which_set_it_is() -> None:
    assert key_of(name_of((12, 3400))) == (12, 3400)
    assert is_name(name_of((12, 3400)))


def test_what_a_job_is_to_start_from_is_not_given_up_for_a_death_that_is_heard_later() -> None:
    """One holder has all of a set that the other's death kept from being complete."""
    sent = []
    on_one_node = META | {"plan": plan("tp=2,pp=1,dp=1", "a0 a1", spec()).to_dict()}

    def send(process: str, order: dict[str, Any]) -> None:
        sent.append((process, order["do"]))
        if order["do"] == "report":
            said = {"say": "holding", "num_bytes": 9, "host": "h", "port": 1, "line": "l", "token": "t"}
            copies.hear({"event": "message", "process": process, "message": said | {"request": order["request"]}})

    processes: Any = SimpleNamespace(rooms=Rooms(dict), send=send)
    gang: Any = SimpleNamespace(pump=lambda until_s: None)
    copies = Copies("j", spec(memory_copy_every_steps=5), processes, gang, lambda event: None)
    copies.holders.adopt({"ha": "a", "hb": "b"})
    copies._asked = (1, 0.0)
    for rank in (0, 1):
        word = held(1, 5, rank, alone=1, copied=True) | {"say": "held", "meta": {} if rank else on_one_node}
        copies.hear({"event": "message", "process": "hb", "message": word})
    best = copies.best()
    copies.hear({"event": "exit", "process": "ha", "code": -9})
    assert best is not None
    assert copies.best() is best
    assert ("hb", "drop") not in sent
