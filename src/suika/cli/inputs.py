"""Files that users name on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from suika.core.cluster import Cluster, parse_cluster_shorthand
from suika.core.cluster_file import cluster_from_dict
from suika.core.errors import SpecError, require

_MOST_BYTES, _MOST_VALUES, _MOST_DEPTH = 16 << 20, 2_000_000, 50
_QUOTE = "put quotes around it"


def read_yaml(path: Path, what: str) -> Any:
    """A YAML file, parsed: mappings, lists, texts, numbers, true, false and null. Raises `SpecError` when it cannot be
    read, or holds anything else."""
    import yaml

    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        require(len(content) <= _MOST_BYTES, what, str(path), f"is longer than {_MOST_BYTES} bytes")
        document = yaml.safe_load(content)
    except OSError as error:
        raise SpecError(what, str(path), f"cannot be read: {error.strerror}") from None
    except SpecError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise SpecError(what, str(path), f"is not YAML: {' '.join(str(error).split())[:300]}") from None
    _Plain(what).check(document, what, 0)
    return document


class _Plain:
    """Walks through a document. An alias is one value in the file and many in what it stands for, if need be without
    an end: what is counted is those."""

    def __init__(self, what: str) -> None:
        self._what, self._num_values = what, 0

    def check(self, value: Any, where: str, depth: int) -> None:
        self._num_values += 1
        within = self._num_values <= _MOST_VALUES and depth <= _MOST_DEPTH
        require(within, self._what, where, "holds too many values, or too many in each other", "write fewer")
        if isinstance(value, dict):
            for key, item in value.items():
                require(isinstance(key, str), where, str(key)[:60], "is no text, as a key must be", _QUOTE)
                self.check(item, f"{where}.{key}"[:120], depth + 1)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self.check(item, f"{where}[{index}]"[:120], depth + 1)
        else:
            plain = value is None or isinstance(value, (str, int, float, bool))
            require(plain, where, str(value)[:60], f"is a {type(value).__name__}, which means nothing here", _QUOTE)


def read_cluster(text: str) -> Cluster:
    """`--cluster`: a YAML file, or NODESxDEVICES:TYPE."""
    path = Path(text)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return cluster_from_dict(read_yaml(path, "cluster"))
    return parse_cluster_shorthand(text)
