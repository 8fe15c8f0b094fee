"""Generated requests against the whole OpenAPI, in-process: no server error, and every answer is as documented."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance
from world import World

from suika.control.accounts import Accounts
from suika.control.auth import Role
from suika.control.engines import open_engine
from suika.control.migrate import migrate
from suika.control.rest import make_app

CHECKS = (not_a_server_error, status_code_conformance, response_schema_conformance)


def attack(world: World, folder: Path, num_examples: int) -> int:
    """Send `num_examples` well-formed and as many malformed requests to every route; the number of routes.

    One app for all: whatever state the earlier requests left is a state to be robust in.
    """
    engine = open_engine(f"sqlite:///{folder}/accounts.db")
    migrate(engine)
    accounts = Accounts(engine)
    accounts.add("root", Role.ADMIN)
    world.start("a", "n0/0")
    world.controller.start()
    headers = {"authorization": f"Bearer {accounts.issue('root')}"}
    schema = schemathesis.openapi.from_asgi("/v1/openapi.json", make_app(world.api, accounts))
    few = settings(
        max_examples=num_examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    operations = [found.ok() for found in schema.get_all_operations()]
    for operation in operations:
        if operation.path.endswith("/stream"):
            continue  # it never ends
        for mode in GenerationMode:

            @few
            @given(case=operation.as_strategy(generation_mode=mode))
            def holds(case: Any) -> None:
                case.call_and_validate(headers=headers, checks=CHECKS)

            with suppress(Unsatisfiable):  # a route without parameters cannot be asked wrongly
                holds()
    return len(operations)


def test_every_route(world: World, tmp_path: Path) -> None:
    assert attack(world, tmp_path, num_examples=8) >= 18


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_route_at_length(world: World, tmp_path: Path) -> None:
    assert attack(world, tmp_path, num_examples=400) >= 18
