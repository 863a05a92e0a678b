"""Threads that download."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future


class DownloadThreads:
    """Runs functions in threads, in the order in which they are submitted.

    Those of `concurrent.futures.ThreadPoolExecutor` would make the interpreter wait at its end until all is downloaded.
    """

    def __init__(self, thread_count: int) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._futures: list[Future[None]] = []
        self._threads = [
            threading.Thread(target=self._run, name="stagepack-download", daemon=True) for _ in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[[], None]) -> Future[None]:
        """Call a function when a thread is free."""
        future: Future[None] = Future()
        self._futures.append(future)
        self._tasks.put((future, function))
        return future

    def cancel(self) -> None:
        """Call no further function."""
        for future in self._futures:
            future.cancel()
        for _ in self._threads:
            self._tasks.put(None)

    def join(self) -> None:
        """Wait for the functions that were called, after `cancel`."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - the one who waits for the future raises it
                future.set_exception(error)
            else:
                future.set_result(None)
