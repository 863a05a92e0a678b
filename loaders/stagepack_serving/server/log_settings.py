"""The level of the log, which clients may read and set: Triton's logging extension.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_logging.md
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

from stagepack_serving.server.errors import BadRequestError

_LOGGER: Final = logging.getLogger("stagepack")
# Setting -> the least level that is logged when it is the most verbose one that is on.
_LEVELS: Final = {
    "log_verbose_level": logging.DEBUG,
    "log_info": logging.INFO,
    "log_warning": logging.WARNING,
    "log_error": logging.ERROR,
}


def log_settings() -> dict[str, Any]:
    """Return the settings of the log as the extension defines them."""
    settings: dict[str, Any] = {
        name: _LOGGER.isEnabledFor(level) for name, level in _LEVELS.items() if level != logging.DEBUG
    }
    return settings | {"log_verbose_level": int(_LOGGER.isEnabledFor(logging.DEBUG)), "log_format": "default"}


def update_log_settings(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change the level of the log. It includes all that is more severe, so that more levels may be on than were asked for."""
    for name, value in changes.items():
        if name not in _LEVELS:
            expected = ", ".join(_LEVELS)
            raise BadRequestError(f"the setting {name!r} cannot be changed: expected {expected}")
        is_number = name == "log_verbose_level"
        if type(value) is not (int if is_number else bool) or value < 0:
            expected = "a number, 0 or more" if is_number else "true or false"
            raise BadRequestError(f"the setting {name}: expected {expected}, found {value!r}")
    settings = log_settings() | dict(changes)
    enabled_levels = [level for name, level in _LEVELS.items() if settings[name]]
    _LOGGER.setLevel(min(enabled_levels, default=logging.CRITICAL))
    return log_settings()
