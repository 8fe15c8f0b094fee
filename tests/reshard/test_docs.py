"""Examples in the documentation run as they are."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import suika.reshard.tensors

DESIGN = Path(__file__).parents[2] / "docs" / "design" / "reshard.md"


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DESIGN.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(DESIGN), "exec"), {})
    results = doctest.testmod(suika.reshard.tensors)
    assert results.attempted > 0
    assert results.failed == 0
