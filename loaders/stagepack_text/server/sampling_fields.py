"""The fields of requests for texts that say how tokens are chosen."""

import re
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from stagepack_serving.server.errors import BadRequestError

Probability = Annotated[float, Meta(ge=0, le=1)]
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_StopString = Annotated[str, Meta(min_length=1, max_length=1000)]
_StopStrings = Annotated[list[_StopString], Meta(max_length=16)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
# In messages of msgspec, and of `SamplingFields`.
_FIELD_OF_ERROR: Final = re.compile(r".*`\$\.(\w+)|.*field `(\w+)`|(\w+): ")


class SamplingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that say how tokens are chosen. Those that are absent are as the bundle has them.

    A temperature of 0 takes the likeliest token, and is refused beside `do_sample`. Without `do_sample`, tokens are drawn if a temperature,
    `top_p`, `top_k` or `min_p` says so. Strings that end the text are not part of it.
    """

    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=1000)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1000)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    do_sample: bool | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _StopString | _StopStrings | None = None

    def __post_init__(self) -> None:
        if self.temperature == 0 and self.do_sample:
            raise ValueError("temperature: expected more than 0 beside `do_sample`, found 0")

    def settings(self) -> dict[str, Any]:
        """Return the settings of a generation."""
        own_names = [name for name in SamplingFields.__struct_fields__ if name not in ("max_tokens", "stop")]
        settings = {name: getattr(self, name) for name in own_names} | {
            "max_new_tokens": self.max_tokens,
            "do_sample": self._draws(),
            "temperature": self.temperature or None,
            "num_beams": 1,  # whatever the bundle says
        }
        return {setting: value for setting, value in settings.items() if value is not None}

    def stop_strings(self) -> list[str]:
        """Return the strings that end the text."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def _draws(self) -> bool | None:
        """Whether tokens are drawn; None if the request does not say it."""
        if self.do_sample is not None:
            return self.do_sample
        if self.temperature is not None:
            return self.temperature > 0
        return None if (self.top_p, self.top_k, self.min_p) == (None, None, None) else True


def convert_fields(fields: Any, fields_type: type[Any]) -> Any:
    """Check the fields of a request."""
    try:
        return msgspec.convert(fields, fields_type, str_keys=True)
    except msgspec.ValidationError as error:
        refusal = BadRequestError(f"the request: {error}")
        found_names = _FIELD_OF_ERROR.match(str(error))
        refusal.field_name = found_names and found_names[found_names.lastindex or 0]
        raise refusal from None
