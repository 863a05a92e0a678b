"""The versions of one model, and which of them a request runs on."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.parameters import boolean_parameter
from stagepack_serving.server.served_model import ServedModel


class ModelVersions:
    """The loaded versions of a model.

    Attributes:
        name: the name that clients use.
        serving: the versions that take requests, the newest last.
        retiring: the versions that only finish requests and sequences which they have begun.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.serving: list[ServedModel] = []
        self.retiring: list[ServedModel] = []

    def __iter__(self) -> Iterator[ServedModel]:
        """All versions."""
        return iter((*self.serving, *self.retiring))

    def serve(self, model: ServedModel) -> None:
        """Add a version that takes requests."""
        model.on_sequence_start = partial(self._end_sequence_elsewhere, model)
        self.serving = sorted((*self.serving, model), key=lambda served: int(served.version))

    def retire(self, model: ServedModel) -> None:
        """Send no new requests and sequences to a version."""
        self.serving.remove(model)
        self.retiring.append(model)

    def find(self, version: str) -> ServedModel:
        """Return a version that takes requests.

        version: the version; empty for the newest.
        """
        for model in reversed(self.serving):
            if version in ("", model.version):
                return model
        loaded_versions = ", ".join(model.version for model in self.serving)
        if not loaded_versions:
            raise RequestError(RequestStatus.NOT_FOUND, f"{self.name}: the model is not loaded")
        raise RequestError(
            RequestStatus.NOT_FOUND, f"{self.name}: version {version!r} is not loaded: there is {loaded_versions}"
        )

    def check(self, version: str) -> None:
        """Check that a request may name a version: it takes requests, or has begun sequences that it still finishes.

        version: the version; empty for any.
        """
        if not any(version in ("", model.version) for model in self):
            self.find(version)

    def metadata(self, version: str) -> dict[str, Any]:
        """Return the metadata of a version as the protocol defines it.

        version: the version; empty for the newest.
        """
        return self.find(version).metadata([model.version for model in self.serving])

    def choose(self, version: str, parameters: Mapping[str, Any]) -> ServedModel:
        """Return the version that runs a request: the one that has its sequence, or else the one that it asks for.

        When it starts a sequence there, an older one of the same id ends on every version.

        version: the version that the request names; may be empty.
        """
        sequence_id = parameters.get("sequence_id")
        holders = [model for model in self if version in ("", model.version) and model.has_sequence(sequence_id)]
        if holders and not boolean_parameter(parameters, "sequence_start"):
            return holders[-1]
        return self.find(version)

    def _end_sequence_elsewhere(self, holder: ServedModel, sequence_id: int | str) -> None:
        """End a sequence that has started again in another version."""
        for model in self:
            if model is not holder:
                model.end_sequence(sequence_id)
