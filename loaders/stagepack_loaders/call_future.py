"""The result of a call that was submitted."""

from concurrent.futures import Future
from typing import Any

from stagepack_loaders.executor import Executor


class CallFuture(Future[Any]):
    """The result of a call that was submitted. It cannot be cancelled: the stages work on it already."""

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self._executor = executor
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Any:
        """Return the result of the call; see `concurrent.futures.Future`."""
        if not self.done():
            self._executor.refuse_waiting()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of the call; see `concurrent.futures.Future`."""
        if not self.done():
            self._executor.refuse_waiting()
        return super().exception(timeout)
