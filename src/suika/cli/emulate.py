"""`suika agent --emulate`: one process is the agents of many nodes whose devices do not exist."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from suika.cli.ask import NO_CLUSTER
from suika.cli.extras import need
from suika.cli.inputs import read_cluster
from suika.cli.output import note
from suika.core.errors import require

# Thousands of threads that hardly compute: each that waits for the interpreter asks for it again so often, which alone
# would keep the machine busy.
_SWITCH_S = 0.2
_STACK_BYTES = 512 << 10  # two threads a node: a thousand nodes must not reserve gigabytes


def act_out(
    join: str, token: str, cluster: str, speedup: float, times: Path | None, home: Path | None, ca: Path | None
) -> None:
    """Serve as every node of `cluster` until SIGTERM."""
    need("agent --emulate", "server")
    from suika.agent.emulated import EmulatedRules, Emulation
    from suika.agent.inventory import CpuDevices
    from suika.agent.program import Agent, RefusedError
    from suika.control.client import home as suika_home
    from suika.control.emulation import Emulated, EmulatedPrices

    require(join.startswith(("https://", "http://")), "join", join, "is not a URL", "write https://HOST:PORT")
    topology = read_cluster(cluster)
    prices = EmulatedPrices(Emulated(cluster, speedup, times).pricing(topology), topology)
    emulation = Emulation(prices, speedup)
    folder = (home or suika_home() / "agents").absolute()
    threading.stack_size(_STACK_BYTES)
    sys.setswitchinterval(_SWITCH_S)
    rules = EmulatedRules()
    agents = [
        Agent(
            join,
            token,
            node,
            folder / node.name,
            emulation.node(node.name),
            CpuDevices(node.num_devices, node.device_type),
            ca,
            rules,
        )
        for node in topology.nodes
    ]
    stopped, refused = threading.Event(), []

    def serve(agent: Agent) -> None:
        try:
            agent.run()
        except RefusedError as error:
            refused.append(str(error))
            stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    emulation.start()
    threads = [threading.Thread(target=serve, args=(agent,), name=agent.node.name, daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    stopped.wait()
    for agent in agents:
        agent.stop()
    for thread in threads:
        thread.join(5)
    emulation.stop()
    if refused:
        note(f"suika agent: {refused[0]}")
        sys.exit(NO_CLUSTER)
