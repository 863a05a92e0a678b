"""The gRPC calls in progress, so that a server closes connections after their answers are sent."""

import asyncio
import contextlib
from typing import Any, Final

import grpc

# grpc closes a connection when it has written the last answer; what the kernel has not sent by then is lost if the client writes
# meanwhile: with 512 KB answers on a busy machine, 8 of 450 clients met a reset connection.
_SENDING_SECONDS: Final = 0.5


class OpenCalls:
    """The calls of a gRPC server from their start until their answers are written."""

    def __init__(self) -> None:
        self._count = 0
        self._is_stopping = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def add(self, context: Any) -> None:
        """Count a call until it ends; abort it with UNAVAILABLE if the server is stopping."""
        if self._is_stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this server is stopping: ask another one")
        self._count += 1
        self._is_idle.clear()
        context.add_done_callback(self._remove)

    def _remove(self, _: Any) -> None:
        self._count -= 1
        if not self._count:
            self._is_idle.set()

    async def stop(self, server: Any, seconds: float) -> None:
        """Refuse new calls, wait until the others are answered and the answers are sent, and stop the server.

        seconds: the time that the calls have; then they are cancelled.
        """
        self._is_stopping = True
        if self._count:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_idle.wait(), seconds)
            await asyncio.sleep(_SENDING_SECONDS)
        await server.stop(0)
