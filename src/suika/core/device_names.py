"""Names of device types: the one by which the catalog knows a type, and what vendors, drivers and tables call it.

The one table for all that name devices: clusters, jobs, plans, tables of measured cases, drivers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "V100": ("V100-SXM2", "V100-SXM2-16GB", "V100-SXM2-32GB", "V100-SXM3-32GB", "V100-16GB", "V100-32GB"),
    "A100-40GB": ("A100-SXM4-40GB", "A100-SXM-40GB", "A100-40GB-SXM4", "A100-40G"),
    "A100-80GB": ("A100", "A100-SXM4-80GB", "A100-SXM-80GB", "A100-SXM4", "A100-SXM", "A100-80GB-SXM4", "A100-80G"),
    "A100-PCIE-40GB": (),
    "A100-PCIE-80GB": ("A100-PCIE", "A100 80GB PCIe"),
    "A800": ("A800-SXM4-80GB", "A800-80GB", "A800-SXM4"),
    "H100": (
        *("H100-SXM", "H100-SXM5", "H100-80GB", "H100-SXM-80GB", "H100-SXM5-80GB", "H100-80GB-SXM5", "H100-80G"),
        *("H100 80GB HBM3", "DGX-H100", "HGX-H100"),
    ),
    "H100-PCIE": ("H100-PCIe-80GB", "H100-80GB-PCIe"),
    "H100-96GB": ("H100-SXM5-96GB", "H100-SXM5-94GB", "H100-64GB", "GH200"),
    "H800": ("H800-SXM5-80GB", "H800-80GB", "H800-SXM5"),
    "H200": ("H200-SXM", "H200-SXM5", "H200-141GB", "H200-SXM-141GB", "H200-SXM5-141GB"),
    "B200": ("B200-SXM", "B200-180GB", "DGX-B200", "HGX-B200"),
    "GB200": ("GB200-NVL72",),
    "B300": ("B300-SXM", "DGX-B300", "HGX-B300"),
    "GB300": ("GB300-NVL72",),
    "MI300X": ("MI300X-192GB",),
    "cpu": ("x86_64",),
}
_VENDORS = frozenset(("nvidia", "tesla", "geforce", "amd", "instinct"))


@cache
def plain(name: str) -> str:
    """`name` without case, punctuation and vendor: `NVIDIA H100-SXM` and `h100 sxm` are one."""
    return "".join(word for word in re.findall("[a-z0-9]+", name.lower()) if word not in _VENDORS)


@cache
def _canonical_names() -> Mapping[str, str]:
    return {plain(other): name for name, others in OTHER_NAMES.items() for other in (name, *others)}


def canonical(name: str) -> str | None:
    """The catalog's name of the type called `name`; None for a type that it does not have."""
    return _canonical_names().get(plain(name))


def same_type(one: str, other: str) -> bool:
    """Whether two names mean one type. Names that the catalog does not know differ by more than spelling."""
    return (canonical(one) or plain(one)) == (canonical(other) or plain(other))


def of_driver(name: str) -> str:
    """The type of a device that its driver calls `name` (`NVIDIA A100-SXM4-40GB`); `gpu` for no name at all."""
    words = [word for word in name.split() if word.lower() not in _VENDORS]
    if not words:
        return "gpu"
    first = words[0].partition("-")[0]  # an unknown variant (`H200 NVL`) is taken for its plain sibling
    return canonical(name) or canonical(first) or first
