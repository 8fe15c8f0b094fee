"""What a node adds to every process that it is asked to start, and what it refuses to start."""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from suika.agent.link import Message
from suika.core.errors import require
from suika.core.installed import TO_TRAIN, missing
from suika.runtime import outside
from suika.runtime.gang import COMMAND_ENTRY, HOLDER_ENTRY, RANK_ENTRY, STORE_ENTRY
from suika.runtime.logs import MAX_BYTES, MAX_FILES

TRAINER = "suika.train.program:build"


@dataclass(frozen=True)
class User:
    """Whose processes jobs' processes are."""

    name: str
    uid: int
    gid: int

    @staticmethod
    def named(name: str) -> User:
        """Raises `SpecError` for a user that is not there, or that this process may not become."""
        try:
            found = pwd.getpwnam(name)
        except (KeyError, ValueError):
            require(False, "user", name, "is no user of this machine")
        may = os.geteuid() in (0, found.pw_uid)
        require(may, "user", name, "only root can run jobs as another user", "run the agent as root or as this user")
        return User(name, found.pw_uid, found.pw_gid)


@dataclass(frozen=True)
class Rules:
    """`programs`: what ranks may load. `address`: where other nodes reach this one's ranks; empty: loopback, one node
    alone. `visible`: the variable that names the devices a command may use. `user`: None runs jobs as the agent."""

    programs: Collection[str] = (TRAINER,)
    commands: bool = True
    address: str = ""
    visible: str = ""
    user: User | None = None
    log_bytes: int = MAX_BYTES
    log_files: int = MAX_FILES
    trains: bool = field(default_factory=lambda: not missing(TO_TRAIN))

    def refusal(self, order: Message) -> str | None:
        """Why a `fork` order is not carried out; None if it is."""
        entry, program = order["entry"], order["launch"].get("program")
        if entry in (COMMAND_ENTRY, outside.ENTRY) and not self.commands:
            return "runs no commands (--no-commands)"
        if entry == COMMAND_ENTRY:
            return None
        if entry == outside.ENTRY:  # then with a trainer, and a torch, of its own
            known = order["launch"].get("entry") in (RANK_ENTRY, STORE_ENTRY)
            return None if known else "starts ranks and stores alone"
        if entry not in (RANK_ENTRY, STORE_ENTRY, HOLDER_ENTRY):
            return f"does not start {str(entry)[:80]}"
        if program is not None and program not in self.programs:
            return f"may not load {str(program)[:80]} (--program)"
        return None if self.trains else "has no torch or no xxhash: it runs commands only; pip install 'suika[train]'"

    def completed(self, order: Message) -> Message:
        """The order with what this node knows better than its controller."""
        launch: dict[str, Any] = dict(order["launch"])
        if order["entry"] == COMMAND_ENTRY:
            launch |= {"address": self.address, "visible": self.visible}
        elif self.address:
            launch["variables"] = {**launch.get("variables", {}), "SUIKA_ADDRESS": self.address}
        more: Message = {"launch": launch, "log_limits": {"max_bytes": self.log_bytes, "max_files": self.log_files}}
        if self.user is not None and self.user.uid != os.geteuid():
            more["user"] = {"uid": self.user.uid, "gid": self.user.gid}
        return order | more
