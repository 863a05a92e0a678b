"""A pipeline with state of its own."""

import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from stagepack.errors import OptionError


class PipelineSequence(AbstractContextManager["PipelineSequence"]):
    """A pipeline with state of its own. Made by `CallablePipeline.sequence`.

    Attributes:
        version: the name of the version of the weights that all its calls run on.

    Examples:
        >>> with pipeline.sequence() as chat:
        ...     logits = chat(prompt, position)
    """

    def __init__(
        self,
        submit: "Callable[[tuple[Any, ...], Mapping[str, Any]], Future[Any]]",
        end: Callable[[], None],
        forget: Callable[[], None],
        version: str = "",
    ) -> None:
        self.version = version
        self._submit = submit
        self._end = end
        self._lock = threading.Lock()
        self._submit_count = 0  # of those that have not returned
        self._finalizer = weakref.finalize(self, forget)
        self._finalizer.atexit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline; see `CallablePipeline`."""
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Call the pipeline; where its stages run in other processes, without waiting for the result."""
        with self._lock:
            if not self._finalizer.alive:
                raise OptionError("the sequence is closed: make another one by pipeline.sequence()")
            self._submit_count += 1
        try:
            return self._submit(args, kwargs)
        finally:
            with self._lock:
                self._submit_count -= 1
                ends_now = not self._submit_count and not self._finalizer.alive
            if ends_now:
                self._finish()

    def close(self) -> None:
        """Free the state; after the calls that other threads submit at the moment, which would create it again."""
        with self._lock:
            ends_now = self._finalizer.detach() is not None and not self._submit_count
        if ends_now:
            self._finish()

    def _finish(self) -> None:
        """Free the state, and let go of the weights of the version."""
        self._end()
        del self._submit, self._end

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Free the state."""
        self.close()
