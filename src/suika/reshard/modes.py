"""Whether a move keeps both states side by side or goes piece by piece: what either needs of each node. No torch."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from suika.core.errors import SpecError
from suika.core.redeployment import Mode
from suika.reshard.links import Links
from suika.reshard.memory import peaks, size_of
from suika.reshard.moveplan import MovePlan, contents_of
from suika.reshard.pieces import lean_peaks, pieces_of


def fitting_mode(plan: MovePlan, links: Links, available_bytes: Sequence[int], lean: bool = False) -> Mode:
    """Side by side if every node has the memory for it and `lean` is not wished for, else in pieces.

    `available_bytes`: what the node of each participant can still give; those of a node share it. A pure function, so
    that all participants come to the same. Raises `SpecError` when not even pieces fit.
    """
    has: dict[str, int] = {}
    for device, available in zip(plan.participants, available_bytes, strict=True):
        has[device.node] = min(available, has.get(device.node, available))

    def fit(needed: Mapping[str, int]) -> bool:
        return all(needed[node] <= has[node] for node in has)

    if not lean and (fit(keep_needs(plan)) or fit(keep_needs(plan, links))):
        return "keep"
    for node, needed in lean_needs(plan, links).items():
        if needed > has[node]:
            problem = f"piece by piece it still needs {needed:,} bytes more than now, {has[node]:,} are available"
            raise SpecError("move", node, problem, "move onto more devices, or through a snapshot")
    return "lean"


def keep_needs(plan: MovePlan, links: Links | None = None) -> dict[str, int]:
    """Bytes that each node must give beyond what the job holds there now, for both states side by side. With `links`,
    which takes longer: less the buffers that change hands inside a node as they are."""
    more = [max(0, peak.keep - peak.source) for peak in peaks(plan)]
    if links is not None:
        nodes: dict[int, list[int]] = defaultdict(list)
        for participant, node in enumerate(links.node):
            nodes[node].append(participant)
        for members in nodes.values():
            for participant, names in adoptions(plan, members).items():
                specs = plan.new.specs(participant)
                more[participant] = max(0, more[participant] - size_of({name: specs[name] for name in names}))
    return _by_node(plan, more)


def lean_needs(plan: MovePlan, links: Links) -> dict[str, int]:
    """The same piece by piece."""
    found = zip(lean_peaks(pieces_of(plan, links)), peaks(plan), strict=True)
    return _by_node(plan, [max(0, most - peak.source) for most, peak in found])


def _by_node(plan: MovePlan, of_participant: Sequence[int]) -> dict[str, int]:
    total: dict[str, int] = defaultdict(int)
    for device, num_bytes in zip(plan.participants, of_participant, strict=True):
        total[device.node] += num_bytes
    return dict(total)


def adoptions(plan: MovePlan, neighbours: Iterable[int]) -> dict[int, dict[str, tuple[int, str]]]:
    """Participant -> new buffer -> (owner, its old buffer), among participants that share memory. A pure function.

    A buffer goes over when shape and contents are the same and its owner does not keep it; each goes to one needer.
    """
    group = sorted(neighbours)
    free: dict[object, deque[tuple[int, str]]] = defaultdict(deque)
    for owner in group:
        kept = set(plan.kept(owner).values())
        contents = contents_of(plan.old, owner)
        for name, spec in plan.old.specs(owner).items():
            if name in contents and name not in kept:
                free[spec, contents[name]].append((owner, name))
    found: dict[int, dict[str, tuple[int, str]]] = {}
    for needer in group:
        kept, contents = set(plan.kept(needer)), contents_of(plan.new, needer)
        found[needer] = {
            name: free[spec, contents[name]].popleft()
            for name, spec in plan.new.specs(needer).items()
            if name in contents and name not in kept and free.get((spec, contents[name]))
        }
    return found
