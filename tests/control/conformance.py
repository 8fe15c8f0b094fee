"""What every `Store` promises. Run against memory, SQLite and PostgreSQL: `class Test...(StoreConformance)`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from suika.control.store import News, StaleWriteError, Store, Which
from suika.core.cluster import parse_cluster_shorthand
from suika.core.decision import Reason, ReasonCode
from suika.core.job import Job, JobSpec, JobState, parse_job
from suika.core.layout import Layout
from suika.core.plan import Plan

WHY = Reason(ReasonCode.START, "there is room: für jeden")
CLUSTER = parse_cluster_shorthand("2x4:cpu")


def spec(name: str = "a", **changes: Any) -> JobSpec:
    model = {"family": "llama", "layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257}
    base = {"name": name, "model": model, "data": "/text", "global_batch": 8, "sequence_length": 16, "steps": 50}
    return parse_job(base | {"devices": {"min": 1, "max": 8}} | changes)


def plan(layout: Layout, of: JobSpec) -> Plan:
    devices = CLUSTER.devices[: layout.num_ranks]
    return Plan.checked(layout, devices, of.model, of.global_batch, of.sequence_length, CLUSTER)


def running(store: Store, job_id: str = "j1", name: str = "a") -> Job:
    """A stored job that runs in generation 1."""
    wanted = spec(name)
    store.add(Job(job_id, wanted, 5.0))
    job = store.job(job_id)
    layout = plan(Layout(tp=2, dp=2), wanted)
    store.put(job.to(JobState.STARTING, WHY, plan=layout, generation=1, last_generation=1))
    store.put(store.job(job_id).to(JobState.RUNNING, WHY, started_s=7.5))
    return store.job(job_id)


class StoreConformance:
    """`store` is a fixture of the subclass; so is `again`, which opens what was stored anew (None: cannot)."""

    def test_a_job_comes_back_as_it_was(self, store: Store) -> None:
        job = running(store)
        target = plan(Layout(tp=2, pp=2, dp=2, layers_per_stage=(1, 3)), job.spec)
        moving = job.to(JobState.REDEPLOYING, WHY, target=target, last_generation=2)
        store.put(moving)
        assert store.job("j1") == moving
        assert store.jobs() == (moving,)

    def test_jobs_are_in_order_of_submission(self, store: Store) -> None:
        for job_id, submitted_s in (("j3", 1.0), ("j2", 2.0), ("j1", 1.0)):
            store.add(Job(job_id, spec(job_id), submitted_s))
        assert [job.id for job in store.jobs()] == ["j1", "j3", "j2"]

    def test_jobs_are_found_by_name_and_in_short(self, store: Store) -> None:
        for job_id, name, submitted_s in (("j1", "a", 1.0), ("j2", "a", 3.0), ("j3", "b", 2.0)):
            store.add(Job(job_id, spec(name), submitted_s))
        store.put(store.job("j1").to(JobState.CANCELLED, WHY, ended_s=4.0))
        assert [job.id for job in store.active()] == ["j3", "j2"]
        assert [(head.id, head.name, head.state) for head in store.heads()] == [
            ("j1", "a", JobState.CANCELLED),
            ("j3", "b", JobState.QUEUED),
            ("j2", "a", JobState.QUEUED),
        ]
        assert [head.id for head in store.named("a")] == ["j1", "j2"]
        assert [head.id for head in store.named("j3")] == ["j3"]
        assert store.named("nobody") == ()

    def test_others_writes_wait_for_those_made_together(self, store: Store) -> None:
        job, told = running(store), []
        other = threading.Thread(target=lambda: told.append(store.append(2.0, "other")))
        with store.together():
            other.start()
            other.join(0.2)
            assert not told
            store.put(job.update(num_moves=1), News(1.0, "moved"))
        other.join(30)
        assert [event.kind for event in store.events()][-2:] == ["moved", "other"]

    def test_writes_made_together_are_all_there(self, store: Store) -> None:
        job = running(store)
        with store.together():
            store.put(job.update(num_moves=1), News(8.0, "first", {}))
            store.put(store.job("j1").update(spec=spec("a", steps=70)))
            store.append(9.0, "second")
            store.put(store.job("j1").update(num_moves=3))
            store.add(Job("j2", spec("b"), 9.0), News(9.0, "third", {}))
        found = store.job("j1")
        assert (found.version, found.num_moves, found.spec.steps) == (job.version + 3, 3, 70)
        assert [event.kind for event in store.events()] == ["first", "second", "third"]
        assert [event.seq for event in store.events()] == [1, 2, 3]

    def test_who_read_an_older_version_writes_nothing(self, store: Store) -> None:
        job = running(store)
        store.put(job.to(JobState.PREEMPTING, WHY))
        with pytest.raises(StaleWriteError):
            store.put(job.to(JobState.CANCELLED, WHY))
        assert store.job("j1").state is JobState.PREEMPTING

    def test_of_many_writers_of_one_version_one_wins(self, store: Store) -> None:
        job, won, lost = running(store), [], []

        def write(number: int) -> None:
            try:
                store.put(job.update(num_moves=number))
                won.append(number)
            except StaleWriteError:
                lost.append(number)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert (len(won), len(lost)) == (1, 7)
        assert store.job("j1").num_moves == won[0]

    def test_progress_counts_for_the_present_generation_only(self, store: Store) -> None:
        job = running(store)
        assert store.progress("j1", 1, 12)
        assert not store.progress("j1", 0, 13)
        assert not store.progress("j1", 2, 13)
        store.put(job.update(num_moves=1))  # made from the record before the progress: takes back no step
        assert store.job("j1").steps_done == 12
        assert store.progress("j1", 1, 6)  # after a recovery
        store.put(store.job("j1").to(JobState.CANCELLED, WHY, ended_s=9.0))
        assert not store.progress("j1", 1, 20)
        assert store.job("j1").steps_done == 6

    def test_a_snapshot_counts_for_the_present_generation_only(self, store: Store) -> None:
        running(store)
        assert store.snapshot("j1") is None
        assert store.saved("j1", 1, 10, "/snapshots/10")
        assert store.saved("j1", 1, 20, "/snapshots/20")
        assert not store.saved("j1", 2, 30, "/snapshots/30")
        assert store.snapshot("j1") == ("/snapshots/20", 20)

    def test_events_are_numbered_without_gaps_and_kept(self, store: Store) -> None:
        for number in range(5):
            store.append(float(number), "tick", "j1" if number % 2 else None, number=number, text="<b>'\"ü")
        assert [event.seq for event in store.events()] == [1, 2, 3, 4, 5]
        assert [event.data["number"] for event in store.events(after=2)] == [2, 3, 4]
        assert [event.seq for event in store.events(job_id="j1")] == [2, 4]
        assert [event.seq for event in store.events(after=1, limit=2)] == [2, 3]
        assert store.events()[0].data["text"] == "<b>'\"ü"

    def test_events_may_be_asked_for_by_kind_time_tenant_and_from_the_end(self, store: Store) -> None:
        for number, tenant in enumerate(("mine", "mine", "other")):
            made = spec(f"s{number}").model_copy(update={"tenant": tenant})
            store.add(Job(f"j{number}", made, 1.0), News(float(number), "submitted"))  # 1 to 3
        store.append(3.0, "node-arrived", node="n0")
        store.append(4.0, "cycle", decisions=1)
        for number in range(6, 9):
            store.append(float(number), "decided", f"j{number - 6}", text="%_")

        def asked(after: int = 0, job_id: str | None = None, limit: int | None = None, **which: Any) -> list[int]:
            return [event.seq for event in store.events(after, job_id, limit, Which(**which))]

        assert store.last_seq() == 8
        assert asked(kinds=frozenset(("decided", "cycle"))) == [5, 6, 7, 8]
        assert asked(kinds=frozenset()) == []
        assert asked(limit=3, last=True) == [6, 7, 8]
        assert asked(limit=3, last=True, before=6) == [3, 4, 5]
        assert asked(before=3) == [1, 2]
        assert asked(before=0) == asked(before=1) == []
        assert asked(after=6, limit=9, last=True) == [7, 8]
        assert asked(since_s=4.0) == [5, 6, 7, 8]
        assert asked(tenant="mine") == [1, 2, 4, 6, 7]
        assert asked(tenant="nobody") == [4]
        assert asked(tenant="mine", limit=2, last=True) == [6, 7]
        assert asked(job_id="j1", tenant="mine", kinds=frozenset(("decided",))) == [7]

    def test_many_threads_append_without_a_gap(self, store: Store) -> None:
        def write(name: int) -> None:
            for number in range(10):
                store.append(0.0, "tick", None, name=name, number=number)

        threads = [threading.Thread(target=write, args=(name,)) for name in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        events = store.events()
        assert [event.seq for event in events] == list(range(1, 61))
        for name in range(6):
            assert [e.data["number"] for e in events if e.data["name"] == name] == list(range(10))

    def test_a_change_and_its_news_are_stored_together_or_not_at_all(self, store: Store) -> None:
        store.add(Job("j1", spec(), 5.0), News(5.0, "submitted", {"by": "ann"}))
        job = store.job("j1")
        store.put(job.update(num_moves=1), News(6.0, "moved"))
        with pytest.raises(StaleWriteError):
            store.put(job.update(num_moves=2), News(7.0, "moved"))
        store.append(8.0, "tick")
        told = [(event.seq, event.at_s, event.kind, event.job_id) for event in store.events()]
        assert told == [(1, 5.0, "submitted", "j1"), (2, 6.0, "moved", "j1"), (3, 8.0, "tick", None)]
        assert store.events()[0].data == {"by": "ann"}

    def test_the_newest_calibration_of_a_job_and_device_type_is_kept(self, store: Store) -> None:
        running(store)
        running(store, "j2", "b")
        store.calibrated("j1", "cpu", {"version": 1})
        store.calibrated("j2", "cpu", {"version": 1, "pace": None})
        store.calibrated("j1", "H100", {"version": 3})
        store.calibrated("j1", "cpu", {"version": 2, "mean": [0.1, -0.2]})
        found = store.calibrations()
        assert list(found) == [("j2", "cpu"), ("j1", "H100"), ("j1", "cpu")]
        assert found["j1", "cpu"] == {"version": 2, "mean": [0.1, -0.2]}

    def test_draining_nodes(self, store: Store) -> None:
        store.set_draining(frozenset({"n0", "n1"}))
        store.set_draining(frozenset({"n1"}))
        assert store.draining() == {"n1"}
        store.set_draining(frozenset())
        assert store.draining() == frozenset()


class DurableConformance(StoreConformance):
    """What a store promises besides that outlives its process. `url` is a fixture: a database without tables."""

    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        from suika.control.database import DatabaseStore

        made = DatabaseStore(url)
        yield made
        made.close()

    def test_everything_is_there_after_a_restart(self, url: str) -> None:
        from suika.control.database import DatabaseStore

        first = DatabaseStore(url)
        running(first)
        first.progress("j1", 1, 12)
        first.saved("j1", 1, 10, "/snapshots/10")
        first.append(1.5, "tick", "j1", number=1)
        first.calibrated("j1", "cpu", {"version": 7})
        first.set_draining(frozenset({"n1"}))
        job = first.job("j1")
        first.close()
        second = DatabaseStore(url)
        assert second.term == first.term + 1
        assert second.jobs() == (job,)
        assert job.steps_done == 12
        assert second.snapshot("j1") == ("/snapshots/10", 10)
        assert [event.to_dict() for event in second.events()] == [event.to_dict() for event in first.events()]
        assert second.draining() == {"n1"}
        assert second.calibrations() == {("j1", "cpu"): {"version": 7}}
        assert second.append(2.0, "tick").seq == 2
        second.close()

    def test_together_is_all_or_nothing(self, store: Store, url: str) -> None:
        """An error takes everything back, in the database and in what reads see."""
        from suika.control.database import DatabaseStore

        job = running(store)
        store.saved("j1", 1, 10, "/snapshots/10")
        before = (store.jobs(), store.events(), store.heads())

        def write_and_fail() -> None:
            with store.together():
                store.saved("j1", 1, 20, "/snapshots/20")
                store.put(job.to(JobState.CANCELLED, WHY, ended_s=9.0), News(9.0, "job-cancelled", {}))
                store.add(Job("j2", spec("b"), 9.0), News(9.0, "submitted", {}))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            write_and_fail()
        assert (store.jobs(), store.events(), store.heads()) == before
        assert store.active() == (job,)
        assert store.named("b") == ()
        assert store.snapshot("j1") == ("/snapshots/10", 10)
        store.append(10.0, "goes-on")
        assert [event.seq for event in store.events()] == [1]
        second = DatabaseStore(url)
        assert second.jobs() == before[0]
        assert second.snapshot("j1") == ("/snapshots/10", 10)
        second.close()

    def test_progress_made_within_a_transaction_is_written_with_it(self, store: Store, url: str) -> None:
        from suika.control.database import DatabaseStore

        running(store)
        with store.together():
            store.progress("j1", 1, 12)
            store.append(9.0, "tick", "j1")
        second = DatabaseStore(url)
        assert second.job("j1").steps_done == 12
        second.close()

    def test_many_add_at_once(self, store: Store) -> None:
        """All are there, each with its event, and numbers have no gaps."""

        def add(number: int) -> None:
            for index in range(5):
                name = f"j{number}-{index}"
                store.add(Job(name, spec(name), float(number)), News(1.0, "submitted", {}))

        threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.jobs()) == 40
        events = store.events()
        assert {event.job_id for event in events} == {job.id for job in store.jobs()}
        assert [event.seq for event in events] == list(range(1, 41))

    def test_an_earlier_controller_writes_nothing(self, url: str) -> None:
        from suika.control.accounts import Accounts
        from suika.control.auth import Role
        from suika.control.database import DatabaseStore
        from suika.control.writer import FencedError
        from suika.core.quota import Quota

        fenced: list[bool] = []
        old = DatabaseStore(url, on_fenced=lambda: fenced.append(True))
        job = running(old)
        new = DatabaseStore(url)
        before = (new.jobs(), new.events())
        people = Accounts(old.engine, fence=old.check_term)
        Accounts(new.engine, fence=new.check_term).add("ada", Role.ADMIN)
        writes = (
            lambda: old.put(job.update(num_moves=9)),
            lambda: old.add(Job("j2", spec("b"), 6.0)),
            lambda: old.append(3.0, "tick"),
            lambda: old.saved("j1", 1, 20, "/snapshots/20"),
            lambda: old.set_draining(frozenset({"n0"})),
            lambda: old.calibrated("j1", "cpu", {"version": 1}),
            lambda: people.set_quota("research", Quota(max=4)),
            lambda: people.add("eve", Role.ADMIN),
            lambda: people.issue("ada"),
            lambda: people.revoke("ada"),
            lambda: people.remove("ada"),
        )
        for write in writes:
            with pytest.raises(FencedError):
                write()
        assert len(fenced) == len(writes)
        old.progress("j1", 1, 40)
        old.close()
        new.close()
        third = DatabaseStore(url)
        assert (third.jobs(), third.events()) == before
        assert third.snapshot("j1") is None
        assert third.draining() == frozenset()
        people = Accounts(third.engine)
        assert ([account.name for account in people.all()], people.quotas()) == (["ada"], {})
        third.close()

    def test_the_migrations_make_the_tables(self, store: Any) -> None:
        from alembic.autogenerate import compare_metadata
        from alembic.runtime.migration import MigrationContext

        from suika.control.tables import metadata

        with store.engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), metadata) == []

    def test_accounts_tokens_and_quotas(self, store: Any) -> None:
        from sqlalchemy import text

        from suika.control.accounts import Accounts
        from suika.control.auth import Role
        from suika.core.errors import SpecError
        from suika.core.quota import Quota

        now = [1000.0]
        accounts = Accounts(store.engine, lambda: now[0])
        accounts.add("root", Role.ADMIN)
        ann = accounts.add("ann", Role.USER, "research")
        with pytest.raises(SpecError, match="exists already"):
            accounts.add("ann", Role.READ, "research")
        with pytest.raises(SpecError, match="needs one"):
            accounts.add("bob", Role.USER)
        token, short = accounts.issue("ann"), accounts.issue("ann", lifetime_s=60)
        assert accounts.authenticate(token) == ann == accounts.authenticate(short)
        assert accounts.authenticate(token[:-1]) is None
        with store.engine.connect() as connection:
            kept = " ".join(str(row) for row in connection.execute(text("select * from tokens")))
        assert token not in kept
        now[0] += 61
        assert accounts.authenticate(short) is None
        assert accounts.revoke("ann") == 2
        assert accounts.authenticate(token) is None
        accounts.set_quota("research", Quota(max=4))
        accounts.set_quota("research", Quota(2, max=6))
        accounts.set_quota("sure", Quota(guarantee_nodes=1))
        accounts.set_quota("other", Quota(max=0))
        accounts.set_quota("other", Quota())
        assert accounts.quotas() == {"research": Quota(2, max=6), "sure": Quota(guarantee_nodes=1)}
        accounts.remove("ann")
        assert [account.name for account in accounts.all()] == ["root"]

    def test_a_backup_restores_to_the_same_records(self, url: str, empty_url: str, tmp_path: Any) -> None:
        from suika.control.backup import backup, restore
        from suika.control.database import DatabaseStore
        from suika.core.errors import SpecError

        store = DatabaseStore(url)
        running(store)
        store.saved("j1", 1, 10, "/snapshots/10")
        store.calibrated("j1", "cpu", {"version": 7})
        for number in range(600):
            store.append(float(number), "tick", None, number=number)
        file = tmp_path / "backup.gz"
        rows = backup(url, file)  # beside the running controller
        assert file.stat().st_mode & 0o077 == 0, "jobs' variables are nobody else's"
        assert restore(empty_url, file) == rows == 600 + 4
        with pytest.raises(SpecError, match="not empty"):
            restore(empty_url, file)
        copy = DatabaseStore(empty_url)
        assert copy.jobs() == store.jobs()
        assert copy.events() == store.events()
        assert copy.snapshot("j1") == ("/snapshots/10", 10)
        assert copy.calibrations() == {("j1", "cpu"): {"version": 7}}
        assert copy.term == store.term + 1
        copy.close()
        store.close()
        file.write_bytes(file.read_bytes()[:-40])
        with pytest.raises(SpecError, match=r"cannot be read|ends too early"):
            restore(empty_url, file)
