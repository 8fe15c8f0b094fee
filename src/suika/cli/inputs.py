"""Files that users name on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from suika.core.cluster import Cluster, parse_cluster_shorthand
from suika.core.cluster_file import cluster_from_dict
from suika.core.errors import SpecError


def read_yaml(path: Path, what: str) -> Any:
    """A YAML file, parsed. Raises `SpecError` when it cannot be read."""
    import yaml

    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise SpecError(what, str(path), f"cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(what, str(path), f"is not YAML: {' '.join(str(error).split())}") from None


def read_cluster(text: str) -> Cluster:
    """`--cluster`: a YAML file, or NODESxDEVICES:TYPE."""
    path = Path(text)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return cluster_from_dict(read_yaml(path, "cluster"))
    return parse_cluster_shorthand(text)
