"""REST: every role at every route, tenants apart, idempotency, pages, sizes, events as they happen."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from world import World

from suika.control.accounts import Accounts
from suika.control.agents import UnreachableError
from suika.control.auth import Role
from suika.control.boundary import MAX_BODY_BYTES
from suika.control.engines import open_engine
from suika.control.joblogs import JobLogs, _cursor
from suika.control.migrate import migrate
from suika.control.netdoor import NetDoor
from suika.control.rest import make_app
from suika.control.store import News
from suika.control.tenancy import OF_OTHERS
from suika.core.decision import Reason, ReasonCode
from suika.core.job import JobState
from suika.core.quota import Quota
from suika.runtime.events import Outcome
from suika.runtime.logs import path_of

PEOPLE = {
    "ada": (Role.ADMIN, None),
    "olga": (Role.OPERATOR, None),
    "ann": (Role.USER, "research"),
    "bob": (Role.USER, "product"),
    "rita": (Role.READ, "research"),
    "n0": (Role.NODE, None),
}


@pytest.fixture
def rest(world: World, tmp_path: Path) -> Iterator[SimpleNamespace]:
    engine = open_engine(f"sqlite:///{tmp_path}/accounts.db")
    migrate(engine)
    accounts = Accounts(engine)
    tokens = {}
    for name, (role, tenant) in PEOPLE.items():
        accounts.add(name, role, tenant)
        tokens[name] = accounts.issue(name)
    app = make_app(world.api, accounts)
    door = NetDoor(app, "127.0.0.1", 0)
    with httpx.Client(base_url=door.url, timeout=30) as client:

        def ask(who: str, method: str, path: str, **rest: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {tokens[who]}"} | rest.pop("headers", {})
            return client.request(method, path, headers=headers, **rest)

        yield SimpleNamespace(
            world=world, ask=ask, client=client, tokens=tokens, accounts=accounts, app=app, url=door.url
        )
    door.close()
    engine.dispose()


# (method, path, body) -> who may; "own" routes are asked about a job of tenant research.
VIEWERS = {"ada", "olga", "ann", "rita"}
MATRIX: list[tuple[str, str, Any, set[str]]] = [
    ("GET", "/v1/jobs", None, VIEWERS | {"bob"}),
    ("POST", "/v1/jobs?dry_run=true", "job", {"ada", "olga", "ann", "bob"}),
    ("GET", "/v1/jobs/mine", None, VIEWERS),
    ("GET", "/v1/jobs/mine/explanation", None, VIEWERS),
    ("GET", "/v1/jobs/mine/logs?tail=5", None, VIEWERS),
    ("POST", "/v1/jobs/mine/resize", {"devices": "1:4"}, {"ada", "olga", "ann"}),
    ("POST", "/v1/jobs/mine/cancel", None, {"ada", "olga", "ann"}),
    ("GET", "/v1/nodes", None, VIEWERS | {"bob"}),
    ("POST", "/v1/nodes/n0/drain", {"deadline_s": 600}, {"ada", "olga"}),
    ("GET", "/v1/events", None, VIEWERS | {"bob"}),
    ("GET", "/v1/usage", None, VIEWERS | {"bob"}),
    ("GET", "/v1/events/stream?job=mine", None, VIEWERS),
    ("GET", "/metrics", None, {"ada", "olga"}),
    ("GET", "/v1/accounts", None, {"ada"}),
    ("POST", "/v1/accounts", {"name": "new", "role": "read", "tenant": "research"}, {"ada"}),
    ("DELETE", "/v1/accounts/rita", None, {"ada"}),
    ("POST", "/v1/accounts/bob/tokens", {}, {"ada"}),
    ("DELETE", "/v1/accounts/bob/tokens", None, {"ada"}),
    ("GET", "/v1/quotas", None, VIEWERS | {"bob"}),
    ("PUT", "/v1/quotas/research", {"max": 4}, {"ada"}),
]


def test_the_matrix_names_every_route(rest: SimpleNamespace) -> None:
    said = {
        (method, re.sub(r"/(mine|n0|rita|bob|research)", "/{}", path.split("?")[0])) for method, path, _, _ in MATRIX
    }
    spec = rest.client.get("/v1/openapi.json").json()
    there = {(m.upper(), re.sub(r"\{.*?\}", "{}", path)) for path, ms in spec["paths"].items() for m in ms}
    assert there - {("GET", "/healthz")} == said


@pytest.mark.parametrize(("method", "path", "body", "may"), MATRIX, ids=lambda v: v if isinstance(v, str) else "")
def test_who_may_do_what(rest: SimpleNamespace, method: str, path: str, body: Any, may: set[str]) -> None:
    rest.world.submit("mine", tenant="research")
    # The refused first: they must leave everything as it was for the others.
    for who in sorted(PEOPLE, key=lambda name: name in may):
        before = (rest.world.store.jobs(), len(rest.world.store.events()), rest.accounts.all(), rest.accounts.quotas())
        sent = rest.world.file("other") if body == "job" else body
        if "stream" in path and who in may:
            with rest.client.stream(method, path, headers={"authorization": f"Bearer {rest.tokens[who]}"}) as stream:
                assert stream.status_code == 200
            continue
        if "/accounts/bob" in path and who == "bob":
            continue
        status = rest.ask(who, method, path, json=sent).status_code
        if who in may:
            assert status < 300 or (status, who) in {(404, "olga"), (422, "olga")}, (who, status)
        else:
            assert status in (403, 404), (who, status)
            after = (
                rest.world.store.jobs(),
                len(rest.world.store.events()),
                rest.accounts.all(),
                rest.accounts.quotas(),
            )
            assert after == before, who
    assert rest.client.request(method, path, json=body if body != "job" else {}).status_code == 401
    wrong = {"authorization": "Bearer suika_" + "x" * 43}
    assert rest.client.request(method, path, json=body if body != "job" else {}, headers=wrong).status_code == 401


def test_a_tenant_sees_only_its_own(rest: SimpleNamespace) -> None:
    world = rest.world
    world.start("secret", "n0/0", tenant="product")
    world.submit("open", tenant="research")
    world.turn()
    assert [job["name"] for job in rest.ask("ann", "GET", "/v1/jobs").json()["jobs"]] == ["open"]
    assert rest.ask("ann", "GET", "/v1/jobs/secret").status_code == 404
    assert rest.ask("ann", "GET", f"/v1/jobs/{world.job('secret').id}").status_code == 404
    for path in ("/v1/jobs", "/v1/nodes", "/v1/events"):
        assert "secret" not in rest.ask("ann", "GET", path).text
        assert "secret" in rest.ask("bob", "GET", path).text
    devices = rest.ask("ann", "GET", "/v1/nodes").json()["nodes"][0]["devices"]
    assert devices[0] == {"device": "n0/0", "state": "used", "jobs": ["(another tenant's)"], "slow": None}
    refused = rest.ask("ann", "POST", "/v1/jobs", json=world.file("x", tenant="product"))
    assert (refused.status_code, refused.json()["error"]["field"]) == (403, "job.tenant")
    made = rest.ask("ann", "POST", "/v1/jobs", json=world.file("x"))
    assert (made.status_code, made.json()["tenant"]) == (201, "research")


def test_no_sentence_names_another_tenants_job(rest: SimpleNamespace) -> None:
    """Two jobs of one name; one waits for the other's devices, and may hear that, but not whose they are."""
    world = rest.world
    world.start("same", "n0/0", "n0/1", tenant="product")
    world.now += 1.0
    world.start("same", "n1/0", tenant="research")
    theirs, mine = (
        next(job for job in world.store.jobs() if job.spec.tenant == tenant) for tenant in ("product", "research")
    )
    world.submit("waits", tenant="research")
    waits = Reason(ReasonCode.NO_FREE_DEVICES, f"job {theirs.id} keeps n0/0, job {mine.id} keeps n1/0")
    job = world.job("waits")
    world.store.put(job.update(reason=waits), News(world.now, "waits", {"sentence": waits.sentence}))
    world.api.drain("n0", deadline_s=600)
    for path in ("/v1/jobs", "/v1/jobs/waits", "/v1/jobs/waits/explanation", "/v1/events", "/v1/nodes"):
        text = rest.ask("ann", "GET", path).text
        assert theirs.id not in text, path
        assert "product" not in text, path
        assert theirs.id in rest.ask("ada", "GET", path).text or path == "/v1/nodes"
    assert f"job {OF_OTHERS} keeps n0/0, job {mine.id} keeps n1/0" in rest.ask("ann", "GET", "/v1/jobs/waits").text
    devices = rest.ask("ann", "GET", "/v1/nodes").json()["nodes"]
    assert devices[0]["devices"][0]["jobs"] == [OF_OTHERS]
    assert devices[0]["drain"]["left"] == []
    assert devices[1]["devices"][0]["jobs"] == ["same"]
    assert rest.ask("ann", "GET", "/v1/jobs/same").json()["id"] == mine.id
    assert rest.ask("bob", "GET", "/v1/jobs/same").json()["id"] == theirs.id
    both = rest.ask("ada", "GET", "/v1/jobs/same")
    assert both.status_code == 422
    assert theirs.id in both.json()["error"]["fix"]
    key = {"Idempotency-Key": "w"}
    ours = world.file("ours")
    made = rest.ask("ann", "POST", "/v1/jobs", json=ours, headers=key).json()["id"]
    world.store.put(world.store.job(made).update(reason=waits))
    for path, body in (("/v1/jobs", ours), (f"/v1/jobs/{made}/resize", {"devices": "1:2"})):
        text = rest.ask("ann", "POST", path, json=body, headers=key).text
        assert OF_OTHERS in text, path
        assert theirs.id not in text, path
    again = rest.ask("ann", "POST", "/v1/jobs", json=world.file("same"))
    assert again.status_code == 409, "a name is unique within a tenant"


def test_a_job_named_after_anothers_id_does_not_hide_it(rest: SimpleNamespace) -> None:
    world = rest.world
    mine = world.submit("mine", tenant="research")
    assert rest.ask("bob", "POST", "/v1/jobs", json=world.file(mine)).status_code == 201
    assert rest.ask("ann", "GET", f"/v1/jobs/{mine}").json()["tenant"] == "research"
    assert rest.ask("bob", "GET", f"/v1/jobs/{mine}").json()["tenant"] == "product"
    cancelled = rest.ask("ann", "POST", f"/v1/jobs/{mine}/cancel")
    assert (cancelled.status_code, cancelled.json()["tenant"]) == (200, "research")
    assert world.job("mine").state is JobState.CANCELLED


def test_logs_page_by_page_and_only_ones_own(rest: SimpleNamespace) -> None:
    world = rest.world
    run = world.start_command("gang", "n0/0", "n0/1", tenant="research")
    other = world.start_command("secret", "n1/0", tenant="product")
    for each, device, text in (
        (run, "n0/0", "zero\n" * 30_000),
        (run, "n0/1", "one\ntwo\nthr"),
        (other, "n1/0", "x\n"),
    ):
        path_of(world.logs, f"{each.job_id}.1.{device}").write_text(text)
    assert rest.ask("ann", "GET", "/v1/jobs/secret/logs").status_code == 404
    page = rest.ask("ann", "GET", "/v1/jobs/gang/logs?rank=1").json()
    assert [entry["text"] for entry in page["entries"]] == ["one\ntwo\n"], "the line that is being written waits"
    assert (page["more"], page["ended"], page["missing"]) == (False, False, [])
    read, query, pages = "", "rank=0", 0
    while True:
        page = rest.ask("ann", "GET", f"/v1/jobs/gang/logs?{query}").json()
        read, pages = read + "".join(entry["text"] for entry in page["entries"]), pages + 1
        if not page["more"]:
            break
        query = f"rank=0&cursor={page['cursor']}"
    assert read == "zero\n" * 30_000
    assert pages > 2
    tail = rest.ask("ann", "GET", "/v1/jobs/gang/logs?tail=1").json()
    assert [(entry["rank"], entry["text"]) for entry in tail["entries"]] == [(0, "zero\n"), (1, "thr")]
    foreign = _cursor({f"{other.job_id}.1.n1/0": 0})
    assert rest.ask("ann", "GET", f"/v1/jobs/gang/logs?rank=7&cursor={foreign}").json()["entries"] == []
    for odd in ("x", "AAAA", _cursor({"a": -1}), _cursor([1])):  # type: ignore[arg-type]
        assert rest.ask("ann", "GET", f"/v1/jobs/gang/logs?cursor={odd}").status_code == 422
    run.ended(Outcome.FINISHED, exit_code=0)
    world.turn()
    page = rest.ask("ann", "GET", "/v1/jobs/gang/logs?rank=1").json()
    assert (page["entries"][0]["text"], page["ended"]) == ("one\ntwo\nthr", True)


def test_a_retry_is_the_same_job_and_another_body_a_conflict(rest: SimpleNamespace) -> None:
    body, key = rest.world.file("a"), {"Idempotency-Key": "k1"}
    ids = {rest.ask("ann", "POST", "/v1/jobs", json=body, headers=key).json()["id"] for _ in range(4)}
    assert len(ids) == 1
    other = rest.ask("ann", "POST", "/v1/jobs", json=rest.world.file("a", steps=7), headers=key)
    assert (other.status_code, other.json()["error"]["field"]) == (409, "request_id")
    # A key is its account's own: bob's k1 is another request.
    assert rest.ask("bob", "POST", "/v1/jobs", json=rest.world.file("b"), headers=key).status_code == 201
    same_name = rest.ask("ann", "POST", "/v1/jobs", json=body)
    assert (same_name.status_code, same_name.json()["error"]["field"]) == (409, "job.name")
    assert len(rest.world.store.jobs()) == 2


def test_the_same_request_from_many_clients_at_once_makes_one_job(rest: SimpleNamespace) -> None:
    answers: list[httpx.Response] = []

    def send() -> None:
        answers.append(rest.ask("ann", "POST", "/v1/jobs", json=rest.world.file("a"), headers={"Idempotency-Key": "k"}))

    rest.world.controller.start()
    threads = [threading.Thread(target=send) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [answer.status_code for answer in answers] == [201] * 12
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(rest.world.store.jobs()) == 1


def test_mistakes_name_the_field_and_the_fix(rest: SimpleNamespace) -> None:
    def problem(**changes: Any) -> dict[str, Any]:
        answer = rest.ask("ann", "POST", "/v1/jobs", json=rest.world.file("a") | changes)
        assert answer.status_code == 422
        return answer.json()["error"]

    assert "9 of 8 devices" in problem(devices={"min": 9, "max": 9})["problem"]
    assert problem(devices={"min": 3, "max": 2})["field"] == "job.devices"
    assert problem(name="x" * 64)["field"] == "job.name"
    assert problem(layout={"tp": 16, "dp": 1})["field"] == "layout.tp"
    assert problem(data="/nowhere")["field"] == "job.data"
    assert problem(nonsense=1)["fix"].startswith("known: ")
    assert rest.world.store.jobs() == ()


def test_pages(rest: SimpleNamespace) -> None:
    world = rest.world
    for number in range(7):
        world.now += number % 2  # some are submitted at the same instant
        world.submit(f"j{number}", tenant="research")
    world.submit("secret", tenant="product")
    world.api.cancel("j3")
    seen, after = [], None
    while True:
        query = {"limit": 2} | ({"after": after} if after else {})
        page = rest.ask("rita", "GET", "/v1/jobs", params=query).json()
        seen += [job["name"] for job in page["jobs"]]
        after = page["next"]
        if after is None:
            break
    assert sorted(seen) == ["j0", "j1", "j2", "j4", "j5", "j6"]
    assert [j["name"] for j in rest.ask("rita", "GET", "/v1/jobs?state=cancelled").json()["jobs"]] == ["j3"]
    assert len(rest.ask("rita", "GET", "/v1/jobs?all=true").json()["jobs"]) == 7
    assert rest.ask("rita", "GET", "/v1/jobs?limit=0").status_code == 422


def test_bodies_that_are_too_long_or_no_json(rest: SimpleNamespace) -> None:
    long = b'{"name": "' + b"x" * MAX_BODY_BYTES + b'"}'
    assert rest.ask("ann", "POST", "/v1/jobs", content=long).status_code == 413
    chunks = (b" " * 65536 for _ in range(40))  # without a content-length
    assert rest.ask("ann", "POST", "/v1/jobs", content=chunks).status_code == 413
    for body in (b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": 1e400}', b'{"name": "\\ud800"}'):
        answer = rest.ask("ann", "POST", "/v1/jobs", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 422), (body[:20], answer.text)
        assert "problem" in answer.json()["error"]


def test_data_outside_the_permitted_folders_is_refused(world: World, tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path}/accounts.db")
    migrate(engine)
    accounts = Accounts(engine)
    accounts.add("ann", Role.USER, "research")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "text").write_text("some text to train on\n" * 50)
    (inside / "link").symlink_to("/etc/hostname")
    door = NetDoor(make_app(world.api, accounts, [inside]), "127.0.0.1", 0)
    headers = {"authorization": f"Bearer {accounts.issue('ann')}"}

    def field(path: str) -> str | None:
        body = world.file("a", data=path, devices={"min": 1, "max": 4})
        answer = httpx.post(f"{door.url}/v1/jobs?dry_run=1", json=body, headers=headers)
        return answer.json().get("error", {}).get("field")

    assert field(str(inside / "text")) is None
    for path in ("/etc/hostname", f"{inside}/../inside2", f"{inside}/link", f"{inside}/../../../etc/hostname"):
        assert field(path) == "job.data"
    door.close()


def test_health_waits_for_nothing(rest: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is in the midst of a long decision, and every thread that answers requests waits for it."""
    controller, go_on = rest.world.controller, threading.Event()
    controller.start()
    controller.post(lambda: go_on.wait(30) and None)
    waiting = [threading.Thread(target=rest.ask, args=("ann", "POST", f"/v1/jobs/j{n}/cancel")) for n in range(3)]
    asked = [
        threading.Thread(target=lambda: rest.ask("olga", "POST", "/v1/nodes/n0/drain", json={})) for _ in range(45)
    ]
    for thread in (*waiting, *asked):
        thread.start()
    try:
        deadline = time.monotonic() + 20.0
        while controller.stands_s < 0.5:  # it is in the midst of it
            assert time.monotonic() < deadline
            time.sleep(0.01)
        began_s = time.monotonic()
        answer = rest.client.get("/healthz")
        assert time.monotonic() - began_s < 10.0, "it waited for the loop"
        assert answer.status_code == 200
        assert answer.json()["stands_s"] > 0.2
        monkeypatch.setattr(controller, "_turned_s", time.monotonic() - 61.0)
        answer = rest.client.get("/healthz")
        assert (answer.status_code, answer.json()["error"]["field"]) == (503, "controller")
    finally:
        go_on.set()
        for thread in (*waiting, *asked):
            thread.join(30)
        controller.close()
    assert all(not thread.is_alive() for thread in asked)


def test_logs_of_nodes_that_hang_keep_no_other_request_waiting(rest: SimpleNamespace) -> None:
    rest.world.start("mine", "n0/0", tenant="research")
    go_on = threading.Event()

    class Hanging:
        def logs(self, node: str, job_id: str) -> list[Any]:
            go_on.wait(30)
            raise UnreachableError(f"{node} did not answer")

        def read(self, *_: Any) -> Any:
            raise AssertionError

    rest.world.api._logs = JobLogs(rest.world.controller.state, Hanging())
    pollers = [threading.Thread(target=rest.ask, args=("ann", "GET", "/v1/jobs/mine/logs")) for _ in range(60)]
    for thread in pollers:
        thread.start()
    try:
        time.sleep(0.5)
        began_s = time.monotonic()
        assert rest.ask("ann", "GET", "/v1/jobs/mine").status_code == 200
        assert time.monotonic() - began_s < 10.0, "it waited for a node"
    finally:
        go_on.set()
        for thread in pollers:
            thread.join(60)
    assert not any(thread.is_alive() for thread in pollers)


def test_the_newest_events_page_by_page(rest: SimpleNamespace) -> None:
    world = rest.world
    mine = world.submit("mine", tenant="research")
    for number in range(30):
        world.store.append(world.now + number, "snapshot", world.submit(f"t{number}", tenant="product"))
        world.store.append(world.now + number, "snapshot", mine, number=number)

    def page(**query: Any) -> list[int]:
        rows = rest.ask("ann", "GET", "/v1/events", params={"newest": True, "limit": 10} | query).json()["events"]
        assert {row["job_id"] for row in rows} <= {mine}
        return [row["seq"] for row in rows]

    everything = [row["seq"] for row in rest.ask("ann", "GET", "/v1/events").json()["events"]]
    last = page()
    middle = page(before=last[0])
    assert middle + last == everything[-20:]
    assert len(page(since=world.now + 25)) == 5
    forward = rest.ask("ann", "GET", "/v1/events", params={"after": everything[-1]}).json()
    assert (forward["events"], forward["next"]) == ([], world.store.last_seq())


def test_events_as_they_happen(rest: SimpleNamespace) -> None:
    rest.world.submit("a", tenant="research")
    headers = {"authorization": f"Bearer {rest.tokens['ann']}", "last-event-id": "0"}
    got: list[dict[str, Any]] = []
    with rest.client.stream("GET", "/v1/events/stream", headers=headers) as stream:
        for line in stream.iter_lines():
            if line.startswith("data:"):
                got.append(json.loads(line[5:]))
                if len(got) == 1:
                    rest.world.api.cancel("a")
                if got[-1]["kind"] == "job-cancelled":
                    break
    assert [event["kind"] for event in got] == ["submitted", "job-cancelled"]


def test_a_stream_ends_with_its_token(rest: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suika.control.cluster_routes.RECHECK_S", 0.3)
    rest.world.submit("a", tenant="research")
    headers = {"authorization": f"Bearer {rest.tokens['ann']}"}
    with rest.client.stream("GET", "/v1/events/stream", headers=headers) as stream:
        lines = stream.iter_lines()
        assert any(line.startswith("data:") for line in lines)
        rest.accounts.revoke("ann")
        rest.world.submit("b", tenant="research")
        list(lines)  # it ends


def test_metrics_are_a_fold_over_the_events(rest: SimpleNamespace) -> None:
    world = rest.world
    run = world.start("a", "n0/0", "n0/1")
    world.turn(seconds=30)
    run.ended(Outcome.LOST, dead=())
    world.turn()
    world.decide(world.grant("a", "n1/0"))
    run.started()
    world.turn(seconds=10)
    run.ended(Outcome.FINISHED)
    world.turn()
    assert world.job("a").state is JobState.FINISHED
    text = rest.ask("olga", "GET", "/metrics").text
    value = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert value['suika_jobs{state="finished"}'] == 1
    assert value['suika_devices{state="free"}'] == 8
    assert value['suika_decisions_total{action="start",reason="start"}'] == 2
    assert value["suika_job_wait_seconds_count"] == value["suika_job_completion_seconds_count"] == 1
    assert value["suika_job_completion_seconds_sum"] == pytest.approx(40)
    assert value['suika_lost_device_seconds_total{cause="device-lost"}'] == pytest.approx(60)
    assert rest.ask("olga", "GET", "/metrics").text.count("\n") == text.count("\n")


def test_a_token_is_void_at_once(rest: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    made = rest.ask("ada", "POST", "/v1/accounts/ann/tokens", json={"lifetime_s": 60}).json()["token"]
    headers = {"authorization": f"Bearer {made}"}
    assert rest.client.get("/v1/jobs", headers=headers).status_code == 200
    monkeypatch.setattr(rest.accounts, "_clock", lambda: time.time() + 60)
    assert rest.client.get("/v1/jobs", headers=headers).status_code == 401
    assert rest.ask("ada", "DELETE", "/v1/accounts/ann/tokens").json()["revoked"] == 2
    assert rest.ask("ann", "GET", "/v1/jobs").status_code == 401
    assert rest.ask("ada", "DELETE", "/v1/accounts/ada").status_code == 422


def test_quotas_reach_the_policy(rest: SimpleNamespace) -> None:
    rest.ask("ada", "PUT", "/v1/quotas/research", json={"max": 4})
    rest.ask("ada", "PUT", "/v1/quotas/product", json={"guarantee": 1, "max": 2})
    rest.world.turn()
    assert rest.world.policy.seen[-1].quotas == {"research": Quota(max=4), "product": Quota(1, max=2)}
    assert rest.ask("ann", "GET", "/v1/quotas").json() == {"quotas": {"research": Quota(max=4).to_dict()}}
    rest.ask("ada", "PUT", "/v1/quotas/research", json={"max": None})
    rest.world.turn()
    assert rest.world.policy.seen[-1].quotas == {"product": Quota(1, max=2)}
    refused = rest.ask("ada", "PUT", "/v1/quotas/product", json={"guarantee": 3, "max": 2})
    assert refused.status_code == 422
    assert "guarantee" in refused.text


def test_the_command_line_over_the_network(
    rest: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Every call that the Unix socket answers is answered the same, with the account's rights."""
    from suika.cli.ask import ask
    from suika.control.remote import call

    world = rest.world
    world.start("a", "n0/0", tenant="research")
    monkeypatch.setenv("SUIKA_SERVER", rest.url)
    monkeypatch.setenv("SUIKA_TOKEN", rest.tokens["ada"])
    assert ask("jobs", all=True) == json.loads(json.dumps(world.api.jobs(all=True)))
    assert ask("describe", job="a") == json.loads(json.dumps(world.api.describe("a")))
    assert ask("explain", job="a")["state"] == "running"
    assert ask("nodes") == world.api.nodes()
    assert ask("resize", job="a", devices="1:4")["name"] == "a"
    assert ask("drain", node="n1", undo=False)["draining"]
    assert ask("events", after=2, job="a") == json.loads(json.dumps(world.api.events(2, "a")))
    first = ask("submit", job=world.file("b"), request_id="r1")
    assert ask("submit", job=world.file("b"), request_id="r1") == first
    assert ask("cancel", job="b")["state"] == "cancelled"
    for number in range(5):
        world.submit(f"j{number}")
    assert len(call("jobs", rest.url)) == 6
    token = tmp_path / "token"
    token.write_text(rest.tokens["rita"] + "\n")
    monkeypatch.delenv("SUIKA_TOKEN")
    monkeypatch.setenv("SUIKA_TOKEN_FILE", str(token))
    for refused, code in ((lambda: ask("cancel", job="a"), 2), (lambda: ask("describe", job="b"), 2)):
        with pytest.raises(SystemExit) as left:
            refused()
        assert left.value.code == code
    monkeypatch.setenv("SUIKA_TOKEN", "nobody's")
    with pytest.raises(SystemExit):
        ask("jobs")
    said = capsys.readouterr().err
    assert "may not submit" in said
    assert "there is no such job" in said
    assert "is not valid at this server" in said
    monkeypatch.setenv("SUIKA_SERVER", "http://127.0.0.1:1")
    with pytest.raises(SystemExit) as left:
        ask("jobs")
    assert left.value.code == 3


def test_a_page_of_others_events_does_not_hide_ones_own(rest: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    from suika.cli.ask import ask

    world = rest.world
    theirs = world.submit("theirs", tenant="product")
    for _ in range(50):
        world.store.append(world.now, "snapshot", theirs)
    world.submit("mine", tenant="research")
    monkeypatch.setenv("SUIKA_SERVER", rest.url)
    monkeypatch.setenv("SUIKA_TOKEN", rest.tokens["ann"])
    seen = ask("events", limit=10)
    assert [event["job_id"] for event in seen] == [world.job("mine").id]
    assert ask("events", after=seen[-1]["seq"], limit=10) == []


def test_tls_by_files(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    from suika.control.client import NoControllerError
    from suika.control.remote import call
    from suika.core.errors import SpecError

    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True, timeout=30)
    engine = open_engine(f"sqlite:///{tmp_path}/accounts.db")
    migrate(engine)
    accounts = Accounts(engine)
    accounts.add("ada", Role.ADMIN)
    monkeypatch.setenv("SUIKA_TOKEN", accounts.issue("ada"))
    with pytest.raises(SpecError, match="open to the network"):
        NetDoor(make_app(world.api, accounts), "0.0.0.0", 0)
    door = NetDoor(make_app(world.api, accounts), "127.0.0.1", 0, cert, key)
    assert door.url.startswith("https://")
    with pytest.raises(NoControllerError, match="CERTIFICATE_VERIFY_FAILED"):
        call("jobs", door.url)
    monkeypatch.setenv("SUIKA_CA", str(cert))
    assert call("jobs", door.url) == []
    door.close()
