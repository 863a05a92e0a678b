"""What an extension adds to a served model."""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from stagepack.adapter.opened import OpenAdapter
    from stagepack_loaders.versions import StageVersion


class ModelPart:
    """What an extension adds to a served model, such as the generation of texts. A model has at most one part of a class."""

    @property
    def joining(self) -> str:
        """How its requests share a run of the model, for people; empty if they do as other requests."""
        return ""

    @property
    def text_count(self) -> int:
        """The number of texts that are generated, or wait for it."""
        return 0

    @property
    def held_tokens(self) -> int:
        """The number of tokens that a cache holds."""
        return 0

    def check_new_adapter(self, adapter: "OpenAdapter") -> None:
        """Refuse an adapter that the part cannot use, before the model takes it."""

    def check_version(self, weights: "StageVersion") -> None:
        """Read what the part needs of a version, before calls run on it; an error refuses the update. Called in any thread."""

    def follow_weights(self) -> None:
        """Begin what is new with the newest weights and adapters of the model, which have changed."""

    def close(self) -> None:
        """End what the part has begun, before the model is closed."""


Part = TypeVar("Part", bound=ModelPart)
