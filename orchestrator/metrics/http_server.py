"""aiohttp's server with limits for its clients.

The number of open connections, their lifetime, the size of a request, and the CPU time for all of
them are bounded. So a misbehaving client may slow down other clients, but never the controller,
which runs in the same process.
"""

from __future__ import annotations

import asyncio
import socket
import time
from asyncio import Transport
from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Thread
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

MAX_CONNECTIONS = 32
"""Connections served at a time. A new connection beyond the limit closes the oldest."""
CONNECTION_LIFETIME_S = 20.0
"""Limit from the connection's start to the last byte of the response."""
MAX_LINE_BYTES = 16 * 1024
"""Size limit of the request line, and of a header."""
CPU_SHARE = 0.25  # of one core, in the long run
CPU_BURST_S = 2.0  # CPU time that may be used at once
_CPU_CHECK_S = 0.1
_MAX_THROTTLE_S = 0.2

Answer: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpServer:
    """An HTTP server, from construction until `stop`. Owns the thread `rayzero-http`, whose event
    loop serves all connections. The constructor raises OSError if it cannot listen on the port.

    Args:
        port: the port; 0 for any free one. The attribute is the port in use.
        answer: called in the server's event loop with every request.
    """

    def __init__(
        self, host: str, port: int, answer: Answer, lifetime_s: float = CONNECTION_LIFETIME_S
    ) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        self._listener = socket.create_server((host, port), family=family, dualstack_ipv6=is_dual)
        self.port = int(self._listener.getsockname()[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._answer = answer
        self._lifetime_s = lifetime_s
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = Thread(target=self._run, name="rayzero-http", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stops listening, and closes the connections. Idempotent."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        """Serves until `stop`. Every response closes its connection, so that idle connections are
        those of slow clients."""

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            server.requests.append(request)
            try:
                response = await self._answer(request)
            finally:
                server.requests.remove(request)
            response.force_close()
            return response

        server = _BoundedServer(
            answer,
            access_log=None,
            lingering_time=0,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
        )
        server.lifetime_s = self._lifetime_s
        listening = await self._loop.create_server(server, sock=self._listener)
        throttle = self._loop.create_task(_throttle())
        await self._stopped.wait()
        throttle.cancel()
        listening.close()
        await server.shutdown(_MAX_THROTTLE_S)


class _BoundedServer(web.Server):
    """Closes the oldest connections beyond the limit. Refuses new ones while as many requests of
    clients that have disconnected are still being answered, such as commands that continue."""

    lifetime_s = CONNECTION_LIFETIME_S

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.requests: list[web.BaseRequest] = []

    def connection_made(self, handler: RequestHandler, transport: Transport) -> None:
        super().connection_made(handler, transport)
        transports = [connection.transport for connection in self.connections]
        opened = [transport for transport in transports if transport is not None]
        abandoned = [request for request in self.requests if request.transport is None]
        if len(abandoned) >= MAX_CONNECTIONS:
            transport.abort()  # before anything is read from it
            return
        asyncio.get_running_loop().call_later(self.lifetime_s, transport.abort)
        for oldest in opened[:-MAX_CONNECTIONS]:
            oldest.abort()


class CpuBudget:
    """A leaky bucket that limits the CPU time of a thread."""

    def __init__(self, now_s: float, cpu_s: float) -> None:
        self._now_s = now_s
        self._cpu_s = cpu_s
        self._filled_s = 0.0

    def wait_s(self, now_s: float, cpu_s: float) -> float:
        """Returns how long the thread must pause; 0 if it may run.

        Args:
            now_s: current time.
            cpu_s: CPU time that the thread has used until now.
        """
        leaked_s = CPU_SHARE * (now_s - self._now_s)
        self._filled_s = max(0.0, self._filled_s + cpu_s - self._cpu_s - leaked_s)
        self._now_s, self._cpu_s = now_s, cpu_s
        return max(0.0, self._filled_s - CPU_BURST_S) / CPU_SHARE


async def _throttle() -> None:
    """Blocks the server's event loop, and so its thread, while the CPU budget is used up."""
    budget = CpuBudget(time.monotonic(), time.thread_time())
    while True:
        await asyncio.sleep(_CPU_CHECK_S)
        if (wait_s := budget.wait_s(time.monotonic(), time.thread_time())) > 0:
            time.sleep(min(wait_s, _MAX_THROTTLE_S))  # all clients wait
