"""Sends on the routes from the front, whose callers do not wait for the processes of the stages."""

import threading
from queue import SimpleQueue

from stagepack_loaders.distributed.control import ControlMessage
from stagepack_loaders.distributed.packing import PackedValues
from stagepack_loaders.distributed.process_group import Transfer
from stagepack_loaders.distributed.routes import Route
from stagepack_loaders.distributed.transfers import RouteSenders


class QueuedSenders:
    """Sends at once what its receiver has room for, and the rest in a thread.

    A caller that waited could be the one that takes the results, for which the processes of the stages wait. One thread at a time calls
    `send`, another one `run`.
    """

    def __init__(self, senders: RouteSenders) -> None:
        self._senders = senders
        self._queue: SimpleQueue[tuple[Route, ControlMessage, PackedValues] | None] = SimpleQueue()
        self._unsent_count = 0
        self._lock = threading.Lock()

    def send(self, route: Route, message: ControlMessage, packed_values: PackedValues) -> list[Transfer]:
        """Send a request or command on a route, now or when those before it are sent and the receiver has room; see `RouteSenders.send`."""
        if not self._senders.has_link(route):
            return self._senders.send(route, message, packed_values)
        with self._lock:
            if self._unsent_count or not self._senders.has_room(route):
                self._unsent_count += 1
                self._queue.put((route, message, packed_values))
                return []
        return self._senders.send(route, message, packed_values)

    def run(self) -> None:
        """Send what is queued, until `end` is called."""
        while (unsent := self._queue.get()) is not None:
            self._senders.send(*unsent)
            del unsent  # its values are not kept until the next one comes
            with self._lock:
                self._unsent_count -= 1

    def end(self) -> None:
        """Have `run` return when what is queued is sent."""
        self._queue.put(None)

    def finish(self) -> None:
        """See `RouteSenders.finish`; `run` has returned."""
        self._senders.finish()
