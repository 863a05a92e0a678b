"""One request to a model, from its head to the end of its answer."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagepack_serving.server.model_versions import ModelVersions
from stagepack_serving.server.served_model import ServedModel


@dataclass(slots=True, eq=False, kw_only=True)
class RequestScope:
    """A request, whose model is known before its body is read, and its version after that.

    Attributes:
        versions: the model that the request names.
        requested_version: the version that it names; may be empty.
        deadline: when its answer must begin; the body may shorten it.
        sending_seconds: the time to send the answer once it has begun, in seconds.
        model: the version that runs it, once it is chosen.
    """

    versions: ModelVersions
    requested_version: str
    deadline: asyncio.Timeout
    sending_seconds: float
    model: ServedModel | None = None

    async def begin_answer(self) -> None:
        """Give the answer its time to be sent. Call it before the first byte, as what ends after that is cut off and has no error."""
        await asyncio.sleep(0)  # raises the cancellation of a deadline that has passed
        self.deadline.reschedule(asyncio.get_running_loop().time() + self.sending_seconds)

    @contextlib.contextmanager
    def reserve_place(self, parameters: Mapping[str, Any]) -> Iterator[ServedModel]:
        """Choose the version that runs the request, and count the request among its pending ones for the duration of the context.

        A version is not closed while it has pending requests.
        """
        self.model = self.versions.choose(self.requested_version, parameters)
        with self.model.reserve_place():
            yield self.model
