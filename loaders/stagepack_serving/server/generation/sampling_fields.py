"""How tokens are chosen, as requests say it."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from stagepack_serving.server.errors import RequestError, RequestStatus

_StopString = Annotated[str, Meta(min_length=1, max_length=1000)]
_StopStrings = Annotated[list[_StopString], Meta(max_length=16)]
_Probability = Annotated[float, Meta(ge=0, le=1)]
_TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class SamplingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that say how tokens are chosen. Those that are absent are as the bundle has them.

    Attributes:
        max_tokens: the largest number of new tokens.
        temperature: 0 takes the likeliest token; more draws tokens.
        top_p: draw among the likeliest tokens that have this probability together.
        top_k: draw among so many tokens; 0 is all.
        min_p: draw among tokens of this probability in relation to the likeliest one.
        repetition_penalty: more than 1 makes tokens of the text less likely.
        do_sample: whether tokens are drawn; absent, they are if a temperature, `top_p`, `top_k` or `min_p` says so.
        seed: the seed of the generator that draws.
        stop: strings that end the text; they are not part of it.
    """

    max_tokens: _TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=1000)] | None = None
    top_p: _Probability | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: _Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1000)] | None = None
    do_sample: bool | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _StopString | _StopStrings | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings of a generation."""
        settings = {
            "max_new_tokens": self.max_tokens,
            "do_sample": self._draws(),
            "temperature": self.temperature or None,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
        }
        return {setting: value for setting, value in settings.items() if value is not None}

    def stop_strings(self) -> list[str]:
        """Return the strings that end the text."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def _draws(self) -> bool | None:
        """Whether tokens are drawn; None if the request does not say it."""
        if self.do_sample is not None or self.temperature is None:
            draws = None if (self.top_p, self.top_k, self.min_p) == (None, None, None) else True
            return draws if self.do_sample is None else self.do_sample
        return self.temperature > 0


def convert_fields(fields: Any, fields_type: type[Any]) -> Any:
    """Check the fields of a request."""
    try:
        return msgspec.convert(fields, fields_type)
    except msgspec.ValidationError as error:
        raise RequestError(RequestStatus.BAD_REQUEST, f"the request: {error}") from None
