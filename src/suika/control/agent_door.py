"""Where agents connect: a WebSocket under /v1/agents, handed on to the `AgentHub`."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from starlette.concurrency import run_in_threadpool

from suika.agent.link import Frame, LinkError
from suika.control.accounts import Accounts
from suika.control.agents import AgentHub
from suika.control.auth import Right
from suika.core.errors import SpecError

_HELLO_WAIT_S = 20.0
_RECHECK_S = 60.0  # how long a connection outlives its token
_GOOD_FOR_S = 1.0  # what was found out about a token holds for whoever shows it within that time
_ACKNOWLEDGE_S = 0.1  # after a frame: one acknowledgement for all that came meanwhile
_POLICY_VIOLATION, _GOING_AWAY = 1008, 1001


def install_agents(app: FastAPI, hub: AgentHub, accounts: Accounts) -> None:
    """Routes for agents; an agent shows a token of role node."""
    tokens, outbox = _Tokens(accounts), _Outbox()

    @app.websocket("/v1/agents")
    async def serve_agent(socket: WebSocket) -> None:
        scheme, _, token = socket.headers.get("authorization", "").partition(" ")

        async def may() -> bool:
            return scheme.lower() == "bearer" and await tokens.may_serve(token)

        if not await may():
            await socket.close(_POLICY_VIOLATION)  # before it is accepted: an HTTP 403
            return
        await socket.accept()
        with suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
            await _Conversation(socket, hub, may, outbox).hold()


class _Tokens:
    """Which tokens are a node's. One look at the accounts serves all who show the same token at the same time: a
    thousand agents come back at once, and look again at once."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._good: dict[str, float] = {}  # token -> when it was found good
        self._lock = asyncio.Lock()

    async def may_serve(self, token: str) -> bool:
        async with self._lock:
            now_s = time.monotonic()
            self._good = {known: at_s for known, at_s in self._good.items() if now_s - at_s < _GOOD_FOR_S}
            if token not in self._good and await run_in_threadpool(self._ask, token):
                self._good[token] = time.monotonic()
            return token in self._good

    def _ask(self, token: str) -> bool:
        account = self._accounts.authenticate(token)
        return account is not None and account.may(Right.SERVE)


class _Outbox:
    """Frames from any thread on their way to the event loop, which is woken once for all that come meanwhile: a call
    of the kernel for each, under the hub's lock, would hold up everyone who wants that lock."""

    def __init__(self) -> None:
        self._frames: deque[tuple[asyncio.Queue[Frame | None], Frame]] = deque()
        self._woken = False

    def put(self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Frame | None], frame: Frame) -> None:
        self._frames.append((queue, frame))
        if not self._woken:
            self._woken = True
            loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._woken = False  # first: what comes from now on wakes the loop again
        while self._frames:
            queue, frame = self._frames.popleft()
            queue.put_nowait(frame)


class _Conversation:
    """One connection. Frames are sent in order by one task, whoever asks for it on whatever thread. `may`: whether its
    token is still good."""

    def __init__(self, socket: WebSocket, hub: AgentHub, may: Callable[[], Awaitable[bool]], outbox: _Outbox) -> None:
        self._socket, self._may, self._outbox = socket, may, outbox
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._outgoing: asyncio.Queue[Frame | None] = asyncio.Queue()
        self._acknowledgement: asyncio.TimerHandle | None = None

    async def hold(self) -> None:
        name = await self._join()
        if name is None:
            return
        tasks = [asyncio.create_task(self._send_all()), asyncio.create_task(self._look_at_its_token())]
        try:
            while True:
                text = await self._socket.receive_text()
                # Not on the pool of threads that requests of users wait for: a cluster that starts has much to say.
                self._hub.receive(name, self, text)
                self._acknowledge_soon(name)
                await asyncio.sleep(0)  # a node that talks without a pause does not keep others waiting
        except LinkError as error:
            with suppress(RuntimeError):
                await self._socket.close(_POLICY_VIOLATION, str(error)[:120])
        finally:
            self._hub.leave(name, self)
            for task in tasks:
                task.cancel()
            if self._acknowledgement is not None:
                self._acknowledgement.cancel()

    async def _look_at_its_token(self) -> None:
        while True:
            await asyncio.sleep(_RECHECK_S)
            if not await self._may():
                await self._socket.close(_POLICY_VIOLATION, "its token is not good any more")
                return

    def _acknowledge_soon(self, name: str) -> None:
        def acknowledge() -> None:
            self._acknowledgement = None
            self._hub.acknowledge(name, self)

        if self._acknowledgement is None:
            self._acknowledgement = self._loop.call_later(_ACKNOWLEDGE_S, acknowledge)

    async def _join(self) -> str | None:
        text = await asyncio.wait_for(self._socket.receive_text(), _HELLO_WAIT_S)
        try:
            hello = json.loads(text)
            name, answer = self._hub.join(hello, self)
        except (SpecError, ValueError, RecursionError) as error:
            await self._socket.send_text(json.dumps({"refused": str(error)}))
            await self._socket.close(_POLICY_VIOLATION)
            return None
        await self._socket.send_text(json.dumps(answer))
        self._hub.ready(name, self, self._put, hello["received"] if answer["resumes"] else 0)
        return name

    def _put(self, frame: Frame) -> None:
        self._outbox.put(self._loop, self._outgoing, frame)

    async def _send_all(self) -> None:
        while (frame := await self._outgoing.get()) is not None:
            await self._socket.send_text(json.dumps(frame, separators=(",", ":"), allow_nan=False))
