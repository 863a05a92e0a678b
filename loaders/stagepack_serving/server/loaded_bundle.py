"""A bundle that a server has loaded, and the threads that load and close bundles beside the event loop."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from stagepack_serving.server.served_model import ServedModel

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedBundle:
    """A version of a model, or of several models if the bundle has several entry points.

    Attributes:
        version: the number of the version.
        digest: the digest of the bundle.
        models: a model for each entry point that is served.
        end_processes: ends the processes of the stages, if they have some.
    """

    version: int
    digest: str
    models: Sequence[ServedModel]
    end_processes: Callable[[], None]

    def close(self, seconds: float) -> bool:
        """Finish the queued calls and end the threads; then end the processes.

        seconds: how long to wait for the threads.
        """
        end_time = time.monotonic() + seconds
        is_closed = all([model.close(max(0.0, end_time - time.monotonic())) for model in self.models])
        if is_closed:
            self.end_processes()
        return is_closed


class BundleLoader(Protocol):
    """Loads bundles as a server is told to by its operator. It is called in any thread, one call at a time."""

    def __call__(self, model_name: str, version: int, path: str, *, unless_digest: str | None) -> LoadedBundle | None:
        """Load a bundle, and run its example.

        Args:
            model_name: the name of the model; with several entry points, the first part of the names of the models.
            version: the number of the version.
            path: the path or URL of the bundle.
            unless_digest: the digest of a bundle that is not loaded again; None for any.

        Returns:
            The loaded bundle; None if it has the digest `unless_digest`.

        Raises:
            StagepackError: the bundle cannot be loaded, or its example has other results than those that are recorded.
        """


async def run_in_thread(function: Callable[[], Result]) -> Result:
    """Run a function in a thread of its own, which does not keep the process alive when the server stops."""
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            result.set_exception(error)

    threading.Thread(target=run, name="bundle", daemon=True).start()
    return await asyncio.wrap_future(result)
