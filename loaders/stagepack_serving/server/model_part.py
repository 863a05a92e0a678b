"""What an extension adds to a served model."""

from typing import TypeVar


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

    def follow_weights(self) -> None:
        """Begin what is new with the newest weights of the model, which were updated."""

    def close(self) -> None:
        """End what the part has begun, before the model is closed."""


Part = TypeVar("Part", bound=ModelPart)
