"""Talks to a controller over the network: the same calls as `client`, by REST. Standard library only.

The server is `$SUIKA_SERVER`, the token `$SUIKA_TOKEN` or the contents of `$SUIKA_TOKEN_FILE`; `$SUIKA_CA` names the
certificates of a private authority.
"""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from suika.control.client import ControllerFaultError, NoControllerError
from suika.core.errors import SpecError, require

Route = tuple[str, str, Any, str | None]  # method, path, body, key of the answer that holds the result


def call(name: str, server: str, timeout_s: float = 60.0, **arguments: Any) -> Any:
    """The result of one call, as `client.call` gives it. Raises the same errors."""
    route = _ROUTES.get(name)
    if route is None:
        raise SpecError("server", server, f"'{name}' works only on the controller's own machine", "unset SUIKA_SERVER")
    headers = {"Authorization": f"Bearer {_token()}"}
    if arguments.get("request_id"):
        headers["Idempotency-Key"] = arguments.pop("request_id")
    if name == "jobs":
        return _all_jobs(server, headers, timeout_s, arguments)
    if name == "events":
        return _next_events(server, headers, timeout_s, arguments)
    method, path, body, key = route(arguments)
    answer = _send(server, method, path, body, headers, timeout_s)
    return answer if key is None else answer[key]


def _all_jobs(server: str, headers: Mapping[str, str], timeout_s: float, arguments: Mapping[str, Any]) -> list[Any]:
    """Page after page."""
    rows: list[Any] = []
    after = None
    while True:
        query = _query(all=arguments.get("all") or None, after=after, limit=1000)
        page = _send(server, "GET", f"/v1/jobs{query}", None, headers, timeout_s)
        rows += page["jobs"]
        after = page["next"]
        if after is None:
            return rows


def _next_events(server: str, headers: Mapping[str, str], timeout_s: float, arguments: Mapping[str, Any]) -> list[Any]:
    """The next page that shows anything: of an older controller one may be empty that has others behind it."""
    after = arguments.get("after") or 0
    while True:
        method, path, body, _ = _ROUTES["events"]({**arguments, "after": after})
        page = _send(server, method, path, body, headers, timeout_s)
        if page["events"] or arguments.get("newest") or page["next"] == after:
            return list(page["events"])
        after = page["next"]


def _send(server: str, method: str, path: str, body: Any, headers: Mapping[str, str], timeout_s: float) -> Any:
    data = None if body is None else json.dumps(body).encode()
    more = {} if data is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(server.rstrip("/") + path, data, {**headers, **more}, method=method)
    ca = os.environ.get("SUIKA_CA")
    tls = ssl.create_default_context(cafile=ca) if server.startswith("https") else None
    try:
        with urllib.request.urlopen(request, timeout=timeout_s, context=tls) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise _refusal(error) from None
    except (OSError, ValueError) as error:
        raise NoControllerError(f"no cluster answers at {server} ({error})") from None


def _refusal(error: urllib.error.HTTPError) -> Exception:
    try:
        document = json.load(error)
    except ValueError:
        return ControllerFaultError(f"HTTP {error.code}")
    if error.code == 401:
        return SpecError("token", None, "is not valid at this server", "set SUIKA_TOKEN or SUIKA_TOKEN_FILE")
    if error.code == 503:
        return NoControllerError(document["error"]["problem"])
    if "error" in document:
        return SpecError(**document["error"])
    return ControllerFaultError(str(document.get("fault", error.code)))


def _token() -> str:
    token, path = os.environ.get("SUIKA_TOKEN"), os.environ.get("SUIKA_TOKEN_FILE")
    if token:
        return token
    require(bool(path), "SUIKA_TOKEN", None, "is not set", "set it or SUIKA_TOKEN_FILE to talk to SUIKA_SERVER")
    assert path is not None
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise SpecError("SUIKA_TOKEN_FILE", path, f"cannot be read: {error}") from None


def _query(**fields: Any) -> str:
    given = {
        name: str(value).lower() if value is True else value for name, value in fields.items() if value is not None
    }
    return "?" + urlencode(given) if given else ""


def _job(arguments: Mapping[str, Any], rest: str = "") -> str:
    return f"/v1/jobs/{quote(arguments['job'], safe='')}{rest}"


_ROUTES: dict[str, Callable[[dict[str, Any]], Route]] = {
    "submit": lambda a: ("POST", "/v1/jobs" + _query(dry_run=a.get("dry_run") or None), a["job"], None),
    "jobs": lambda a: ("GET", "/v1/jobs", None, "jobs"),
    "describe": lambda a: ("GET", _job(a), None, None),
    "explain": lambda a: ("GET", _job(a, "/explanation"), None, None),
    "logs": lambda a: (
        "GET",
        _job(a, "/logs") + _query(rank=a.get("rank"), tail=a.get("tail"), cursor=a.get("cursor")),
        None,
        None,
    ),
    "resize": lambda a: (
        "POST",
        _job(a, "/resize"),
        {name: a[name] for name in ("devices", "layout", "dry_run") if a.get(name)},
        None,
    ),
    "cancel": lambda a: ("POST", _job(a, "/cancel"), None, None),
    "nodes": lambda a: ("GET", "/v1/nodes", None, "nodes"),
    "drain": lambda a: (
        "POST",
        f"/v1/nodes/{quote(a['node'], safe='')}/drain",
        {"undo": a.get("undo", False), "deadline_s": a.get("deadline_s")},
        None,
    ),
    "quotas": lambda a: ("GET", "/v1/quotas", None, "quotas"),
    "set_quota": lambda a: ("PUT", f"/v1/quotas/{quote(a['tenant'], safe='')}", a["quota"], None),
    "usage": lambda a: (
        "GET",
        "/v1/usage" + _query(since=a.get("since"), until=a.get("until"), tenant=a.get("tenant")),
        None,
        None,
    ),
    "events": lambda a: (
        "GET",
        "/v1/events"
        + _query(newest=a.get("newest") or None, **{n: a.get(n) for n in ("after", "before", "job", "limit", "since")}),
        None,
        "events",
    ),
}
