"""One class for each thing a caller does differently; every one is a `StagepackError`.

A message says what was expected, what was found, where, and what to do. Errors about the content of a
bundle carry the numbers of the broken rules of ``schema/SPEC.md`` in `FormatError.problems`.
"""

from dataclasses import dataclass


class StagepackError(Exception):
    """Base of all errors that stagepack raises on purpose."""


class CaptureError(StagepackError):
    """``torch.export`` cannot capture the model. Change the model, its inputs or the dynamic shapes."""


class UnsupportedError(StagepackError):
    """The capture holds something that a bundle cannot hold; the message names it."""


class CutError(StagepackError):
    """The model cannot be cut as asked. Ask for another cut."""


class OutputExistsError(StagepackError):
    """The output already exists. Choose another name, or pass ``overwrite=True``."""


class WriteError(StagepackError):
    """The bundle could not be written whole (disk full, no permission). Nothing was changed."""


class InputError(StagepackError):
    """A call does not fit the recorded signature, shapes, ranges or types."""


class DeviceError(StagepackError):
    """A device does not exist here, or the devices do not fit the stages."""


class OperatorError(StagepackError):
    """This runtime has no such operator, has it under another schema, or is not allowed to run it."""


class CompiledError(StagepackError):
    """Compiled code is of another bundle, for another device or torch, or damaged. Compile the bundle again."""


class NotABundleError(StagepackError):
    """The path is not a stagepack bundle."""


class FileNotListedError(StagepackError):
    """The bundle does not have the file that was asked for; `Bundle.files` has the names of its files."""


class VersionError(StagepackError):
    """The bundle is of a newer major version, or needs a feature this reader does not know. Upgrade stagepack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One broken rule: ``rule`` is its number in ``schema/SPEC.md``, ``where`` the place inside the bundle."""

    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} [{self.rule}]"


class FormatError(StagepackError):
    """The bundle breaks rules of the format. Do not use it; ask for it anew from whoever made it.

    Attributes:
        problems: every broken rule that was found, never only the first.
    """

    def __init__(self, problems: list[Problem]) -> None:
        """`problems` holds at least one entry."""
        self.problems = tuple(problems)
        shown = [str(problem) for problem in self.problems[:20]]
        if len(self.problems) > len(shown):
            shown.append(f"and {len(self.problems) - len(shown)} more")
        super().__init__("; ".join(shown))


class DigestError(FormatError):
    """A file is not the one that the manifest lists: missing, truncated or changed. Copy the bundle again."""


class LimitError(FormatError):
    """A size or a depth is over the limits of ``stagepack/format/limits.py``."""
