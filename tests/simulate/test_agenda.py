"""Events come by time, then kind, then as they were entered, what is entered meanwhile included."""

from __future__ import annotations

from suika.simulate.agenda import ARRIVED, END, FAILED, SETTLED, Agenda


def test_order_within_an_instant() -> None:
    agenda, taken = Agenda(), []
    for at_s, kind, what in ((5.0, ARRIVED, "c"), (5.0, END, "a"), (5.0, FAILED, "b"), (5.0, ARRIVED, "d")):
        agenda.enter(at_s, kind, what)
    agenda.enter(6.0, END, "later")
    assert agenda.next_s == 5.0
    for _, what in agenda.take(5.0):
        taken.append(what)
        if what == "b":
            agenda.enter(5.0, SETTLED, "meanwhile")
    assert taken == ["a", "b", "meanwhile", "c", "d"]
    assert (len(agenda), agenda.is_due(5.9), agenda.is_due(6.0)) == (1, False, True)
