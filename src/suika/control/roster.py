"""Nodes as they come and go, on the controller's loop: the cluster grows, devices go down and return clean."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from suika.control.agents import AgentHub
from suika.control.controller import Controller
from suika.control.database import DatabaseStore
from suika.control.pricing import EstimatedPricing
from suika.control.sessions import Watcher
from suika.core.cluster import Cluster, Device, Node
from suika.runtime.messages import Message

UNTIL_IT_RETURNS = math.inf
Keep = Callable[[str], bool]  # whether a process that nobody has claimed belongs to a job that is to be taken back


class GrowingPricing(EstimatedPricing):
    """Of a cluster that nodes may join."""

    def grow(self, cluster: Cluster) -> None:
        """What was known of the smaller cluster is forgotten."""
        super().__init__(cluster, self.cores, self.compute)


class Roster(Watcher):
    """What the hub tells, carried out between cycles. `arrived` keeps the processes that `keep` wants, kills others.

    All devices of a node are down until it is here and no process is left on them that nobody wants.
    """

    def __init__(self, controller: Controller, pricing: GrowingPricing, store: DatabaseStore) -> None:
        self.controller, self.state = controller, controller.state
        self.found: dict[str, dict[str, int]] = {}  # node -> its unclaimed processes, from its arrival to its loss
        self.keep: Keep = lambda process: False
        self.on_change: Callable[[], None] = lambda: None
        self.hub: AgentHub | None = None
        self._pricing, self._store = pricing, store
        self._dirty: dict[str, dict[int, str]] = {}
        self._strangers: dict[str, set[str]] = {}  # node -> processes that are being killed
        for device in self.state.cluster.devices:
            self.state.down[device] = UNTIL_IT_RETURNS

    # -- told by the hub, on its threads ------------------------------------------------------------------------------

    def arrived(self, node: Node, processes: Mapping[str, int]) -> None:
        self.controller.post(lambda: self._arrive(node, dict(processes)))

    def dirty(self, node: str, devices: Mapping[int, str]) -> None:
        self.controller.post(lambda: self._soil(node, dict(devices)))

    def lost(self, node: str) -> None:
        self.controller.post(lambda: self._lose(node))

    # -- on the loop --------------------------------------------------------------------------------------------------

    def _arrive(self, node: Node, processes: dict[str, int]) -> None:
        if self.state.cluster.node_of.get(node.name) != node:
            self._grow(node)
        self.found[node.name] = {p: pid for p, pid in processes.items() if self.keep(p)}
        strangers = set(processes) - set(self.found[node.name])
        self._strangers[node.name] = set()
        self.state.log("node-arrived", node=node.name, kept=len(self.found[node.name]), killed=len(strangers))
        for process in strangers:
            self.clean_up(node.name, process)
        self._show(node.name)
        self.controller.post(self.on_change)  # apart: what it cannot do now it does again, alone

    def _grow(self, node: Node) -> None:
        """The node is new, or came back with other devices."""
        before = self.state.cluster
        others = tuple(other for other in before.nodes if other.name != node.name)
        cluster = replace(before, nodes=(*others, node))
        self._store.remember(node)
        self.state.cluster = cluster
        self._pricing.grow(cluster)
        for watch in self.state.watches.values():
            if watch.run is not None:
                watch.run.cluster = cluster

    def clean_up(self, node: str, process: str) -> None:
        """Kill a process of an earlier life; its node offers nothing until it is gone."""
        assert self.hub is not None
        self._strangers.setdefault(node, set()).add(process)

        def hear(event: Message) -> None:
            if event["event"] == "exit":
                self.controller.post(lambda: self._cleaned(node, process))

        self.hub.claim(process, hear)
        self.hub.kill(process)

    def _cleaned(self, node: str, process: str) -> None:
        self._strangers.get(node, set()).discard(process)
        self._show(node)

    def _soil(self, node: str, devices: dict[int, str]) -> None:
        for index, why in devices.items():
            if self._dirty.get(node, {}).get(index) != why:
                self.state.log("device-dirty", device=f"{node}/{index}", why=why)
        self._dirty[node] = devices
        self._show(node)

    def _lose(self, node: str) -> None:
        self.found.pop(node, None)
        self.state.log("node-lost", node=node)
        self._show(node)
        self.controller.post(self.on_change)

    def _show(self, name: str) -> None:
        """Which of the node's devices may be used now."""
        node, state = self.state.cluster.node_of.get(name), self.state
        if node is None:
            return
        usable = name in self.found and not self._strangers.get(name)
        dirty = self._dirty.get(name, {})
        for device in node.devices:
            if not usable or device.index in dirty:
                state.down[device] = UNTIL_IT_RETURNS
            elif state.down.get(device) == UNTIL_IT_RETURNS:
                del state.down[device]
        state.changed = True

    def processes_of(self, job_id: str) -> list[str]:
        """Of the job, unclaimed, on the nodes that are here."""
        found = (process for processes in self.found.values() for process in processes)
        return [process for process in found if process.partition(".")[0] == job_id]

    def hand_over(self, mine: Collection[str]) -> dict[str, int]:
        """Unclaimed processes with their pids, from now on somebody else's."""
        names = set(mine)
        taken = [(node, process) for node, processes in self.found.items() for process in names & processes.keys()]
        return {process: self.found[node].pop(process) for node, process in taken}

    @property
    def is_complete(self) -> bool:
        """Whether every node of the cluster is here."""
        return all(node.name in self.found for node in self.state.cluster.nodes)

    def devices_away(self, devices: tuple[Device, ...]) -> list[Device]:
        """Those of `devices` whose node is not here."""
        return [device for device in devices if device.node not in self.found]
