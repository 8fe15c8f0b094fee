"""The controller as a service: a database, a network door, agents; killed at any instant, it goes on where it was.

Everything local lives in `folder`, of which one process at a time has the lock: `suika.db` (unless another database is
named), `controller.sock`, `controller.json` (pid, URL, term), the tokens of the first account and of the nodes, jobs'
data and snapshots. Ending the service leaves jobs running, unless it is asked to end them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from suika.control.accounts import Accounts
from suika.control.adopt import Adoption
from suika.control.agent_door import install_agents
from suika.control.agents import AgentHub
from suika.control.api import Api
from suika.control.auth import Role
from suika.control.controller import Controller
from suika.control.database import DatabaseStore
from suika.control.decider import DecisionProcess
from suika.control.emulation import Real, World
from suika.control.joblogs import NodesShelf
from suika.control.netdoor import NetDoor
from suika.control.rest import make_app
from suika.control.roster import Roster
from suika.control.server import SocketServer
from suika.control.service import take_lock
from suika.control.sessions import LEASE_S
from suika.core.cluster import Cluster, Node
from suika.core.errors import SpecError
from suika.core.quota import checked_quota
from suika.schedule.policies import parse_policy

_FENCED_EXIT = 4
_SWITCH_S = 0.001  # a thread that computes gives way after this: a thousand jobs' threads and the doors wait for it
# A full collection among the objects of a thousand jobs stops every answer for 0.3 s and finds a few dozen: it comes
# after 500 small ones instead of ten.
_COLLECT_AFTER = (2_000, 20, 500)


class Daemon:
    """Use as a context. `expected`: nodes that are to join; those that ever joined are expected anyway."""

    def __init__(
        self,
        folder: Path,
        expected: Sequence[Node] = (),
        database: str | None = None,
        policy: str = "suika",
        host: str = "127.0.0.1",
        port: int = 0,
        cert: Path | None = None,
        key: Path | None = None,
        lease_s: float = LEASE_S,
        data_roots: Sequence[Path] | None = None,
        world: World | None = None,
    ) -> None:
        """`data_roots`: where jobs that come over the network may have their data; by default `folder/shared` alone.
        `world`: by default the real one."""
        world = world or Real()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if data_roots is None:
            data_roots = (folder / "shared",)
            data_roots[0].mkdir(mode=0o700, exist_ok=True)
        self.folder = folder
        self.stopped = threading.Event()
        self.ends_jobs = False
        self._lock = take_lock(folder)
        self._decisions = DecisionProcess(policy)  # comes up while the store is read
        self.store = DatabaseStore(database or f"sqlite:///{folder.absolute()}/suika.db", on_fenced=_leave_at_once)
        self._stay_in(world)
        self.store.remember(*expected)
        cluster = Cluster(self.store.nodes())
        self.accounts = Accounts(self.store.engine, fence=self.store.check_term)
        pricing, launcher = world.pricing(cluster, self._decisions.compute), world.launcher(folder.absolute())
        clock = world.clock(folder)
        self.controller = Controller(
            cluster, self.store, parse_policy(policy), pricing, launcher, clock, decide=self._decisions
        )
        self.controller.state.quotas = self.accounts.quotas()
        self.roster = Roster(self.controller, pricing, self.store)
        self.hub = AgentHub(self.roster, lease_s)
        self.controller.state.keep_copies_in(self.hub.rooms)
        launcher.controller, launcher.processes, self.roster.hub = self.controller, self.hub, self.hub
        self.adoption = Adoption(self.controller, self.roster, self.hub, launcher, world.speedup)
        self.api = Api(self.controller, NodesShelf(self.hub))
        self._door_settings = (host, port or _last_port(folder), cert, key)
        self._data_roots = data_roots
        self._door: NetDoor | None = None
        self._server: SocketServer | None = None
        gc.collect()
        gc.freeze()  # what is there now stays: looking through it again and again would stop every answer

    def __enter__(self) -> Daemon:
        sys.setswitchinterval(_SWITCH_S)
        gc.set_threshold(*_COLLECT_AFTER)
        try:
            self.adoption.begin()
            self.controller.start()
            self.hub.start()
            app = make_app(self.api, self.accounts, self._data_roots, lambda: {"agents": any(self.hub.nodes.values())})
            install_agents(app, self.hub, self.accounts)
            host, port, cert, key = self._door_settings
            self._door = NetDoor(app, host, port, cert, key)
            _make_first_accounts(self.accounts, self.folder)
            own = (self.status, self.down, self.quotas, self.set_quota)
            calls: Mapping[str, Any] = {**self.api.calls(), **{call.__name__: call for call in own}}
            # Who gets an answer at the socket may read where the network door is.
            _write(self.folder / "controller.json", json.dumps({"pid": os.getpid(), "url": self.url}))
            self._server = SocketServer(self.folder / "controller.sock", calls)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def url(self) -> str:
        assert self._door is not None, "not started"
        return self._door.url

    @property
    def decisions_pid(self) -> int:
        """Of the process that runs the scheduling cycles."""
        return self._decisions.pid

    def _stay_in(self, world: World) -> None:
        """Jobs that are under way go on in the world that they began in: state of real devices means nothing to
        emulated ones, and the other way round."""
        path = self.folder / "world"
        before = path.read_text().strip() if path.exists() else world.name
        active = [job.spec.name for job in self.store.active()]
        if before != world.name and active:
            self._decisions.close()
            self.store.close()
            os.close(self._lock)
            shown = ", ".join(active[:5]) + (", ..." if len(active) > 5 else "")
            problem = f"has {len(active)} jobs under way on {before} devices ({shown})"
            fix = f"set SUIKA_HOME to another folder for {world.name} ones, or cancel those jobs first"
            raise SpecError("SUIKA_HOME", str(self.folder), problem, fix)
        _write(path, world.name + "\n")

    def status(self) -> dict[str, Any]:
        cluster = self.controller.state.cluster
        here = {node.name: node.name in self.roster.found for node in cluster.nodes}
        about = {"url": self.url, "term": self.store.term, "nodes": here}
        return {"pid": os.getpid(), "cluster": cluster.to_dict(), "home": str(self.folder), **about}

    def down(self) -> dict[str, Any]:
        """Ask for the end of the service and of all jobs; `stopped` tells whoever holds the service to leave it."""
        active = [job.spec.name for job in self.controller.state.active()]
        self.ends_jobs = True
        self.stopped.set()
        return {"pid": os.getpid(), "jobs_ended": active}

    def quotas(self) -> dict[str, Any]:
        """By tenant: what its jobs are guaranteed and hold at most together; no entry: nothing sure, no limit."""
        return {tenant: quota.to_dict() for tenant, quota in self.accounts.quotas().items()}

    def set_quota(self, tenant: str, quota: dict[str, int | None]) -> dict[str, Any]:
        """For all of the tenant's jobs together, from the next decision on; an empty quota takes its entry away."""
        self.accounts.set_quota(tenant, checked_quota(quota))
        self.controller.call(lambda: self.controller.state.limit(self.accounts.quotas()))
        return self.quotas()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.controller.close(leave_jobs=not self.ends_jobs)
        self._decisions.close()
        if self._door is not None:
            self._door.close()
        self.hub.close()
        self.store.close()
        os.close(self._lock)


def _leave_at_once() -> None:
    """Another controller has this database now: nothing that this one still does may reach a node."""
    print("suika: another controller has taken over this database; leaving", file=sys.stderr, flush=True)
    os._exit(_FENCED_EXIT)


def _make_first_accounts(accounts: Accounts, folder: Path) -> None:
    """At the first start: an admin for people and an account for nodes, their tokens in files of the service's user."""
    known = {account.name for account in accounts.all()}
    for name, role in (("admin", Role.ADMIN), ("node", Role.NODE)):
        path = folder / f"{name}.token"
        if name not in known:
            accounts.add(name, role)
        if name not in known or not path.exists():
            _write(path, accounts.issue(name) + "\n")


def _last_port(folder: Path) -> int:
    """Where the service answered before, so that agents find it again; 0 if it is the first time."""
    try:
        return int(json.loads((folder / "controller.json").read_text())["url"].rpartition(":")[2])
    except (OSError, ValueError, KeyError):
        return 0


def _write(path: Path, text: str) -> None:
    """All or nothing, and for this user only."""
    draft = path.with_name(path.name + ".tmp")
    draft.touch(mode=0o600)
    draft.write_text(text)
    draft.rename(path)
