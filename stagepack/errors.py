"""The errors of stagepack: one class for each thing that a caller can do about it.

All of them derive from `StagepackError`. A message says what was expected, what was found, where, and what to do. Errors in the content
of a bundle list every broken rule of ``schema/SPEC.md`` in `FormatError.problems`.
"""

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

SignatureReason = Literal["unsigned", "malformed", "untrusted", "expired", "changed", "files"]


class StagepackError(Exception):
    """Base class of all errors that stagepack raises on purpose. Catch it to catch them all.

    Attributes:
        origin: the process of a group that has failed, with its host, if the message begins with it; empty otherwise. All processes of the
            group raise the error.
    """

    origin: str = ""


Error = TypeVar("Error", bound=StagepackError)


class ExportWarning(UserWarning):
    """A bundle is written, and probably not as it was meant: the message says why. It is no `StagepackError`: the bundle is there."""


# What stands between the line of the caller and that which gives a warning.
_OWN_PACKAGES: Final = frozenset(
    {"stagepack", "stagepack_loaders", "stagepack_serving", "stagepack_text", "stagepack_train", "contextlib"}
)


def warn_caller(warning: Warning) -> None:
    """Give a warning at the line of the caller's code that has called these packages."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN_PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level + 1)


class MissingPackageError(StagepackError, ModuleNotFoundError):
    """A package that the call needs is not installed; stagepack itself requires only the packages that read a bundle.

    Install it: the message has the command. `name` is the module that is missing, as for any `ImportError`.
    """


class OptionError(StagepackError, ValueError):
    """An option has a value that does not exist, or contradicts another option. Change the call."""


class UnchangedError(OptionError):
    """The new version of a bundle is the bundle itself, so that no delta is written. Every process of a training raises it. Go on."""


# Ends the message of an error whose further lines are a file to start from.
STARTING_FILE_MARK: Final = "pass --inputs inputs.py:inputs\n\n"


class CaptureError(StagepackError):
    """The model cannot be loaded, called or captured by ``torch.export``.

    The message has the reason, and the line of the model's code where there is one. Change the model, its example inputs or
    `dynamic_shapes`. The model object itself is as it was before the call.
    """


class AnswerDiffersError(CaptureError):
    """The captured program answers the example otherwise than the model does, by more than rounding; the message names the module.

    Change the model so that it takes one path in eager mode and under ``torch.export``, or pass ``allow_difference=True``.
    """


class UnsupportedError(StagepackError):
    """The captured program contains something that a bundle, or the protocol that serves it, cannot represent; the message names it.

    Change the model.
    """


class CutError(StagepackError):
    """The model cannot be cut as requested, or a plan does not fit the model. Change the cut options or the plan."""


class OutputExistsError(StagepackError):
    """The output exists already. Choose another path, or pass ``overwrite=True``, which replaces only an output of the same kind."""


class WriteError(StagepackError):
    """The output cannot be written: the disk is full, the folder is missing, permission is denied.

    Solve that and repeat the call. Whatever was at the output path before is unchanged.
    """


class InputError(StagepackError):
    """A call of a pipeline or a stage does not fit the recorded signature, shapes, ranges or types. Change the arguments of the call."""


class ValueSizeError(InputError):
    """A value would be larger than the caller's `Limits` allow: at the sizes of a call, or, when the bundle is loaded, at any sizes.

    Give smaller inputs, or raise the limit.
    """


class DeviceError(StagepackError):
    """A device does not exist on this machine or has not enough memory, or there are more devices than stages. Choose other devices."""


class OperatorError(StagepackError):
    """A runtime cannot run an operator of the bundle: it has no such operator, has another version of it, or may not run it.

    Import the library that registers the operator, allow its namespace or the operator by ``allow_ops``, install the version of torch
    that the message names, or choose another runtime.
    """


class AdapterError(StagepackError):
    """An adapter does not fit the bundle, changes weights in a way that no graph applies, or cannot be loaded or unloaded by its name.

    The message names what, and what to do.
    """


class CompiledError(StagepackError):
    """Compiled code is of another bundle, for another device or version of torch, or damaged. Compile the bundle again."""


class GroupError(StagepackError):
    """The processes of a pipeline do not form a group: one process did not connect in time, or they have different bundles or versions.

    Correct the deployment; the message says which process differs or is missing.
    """


class StageFailedError(StagepackError):
    """An operator of a stage failed in a call: memory that cannot be allocated, a matrix that has no inverse. `__cause__` has its error.

    The stage and the other calls are not affected. Change the inputs, or the device.
    """


class StageLostError(StagepackError):
    """A process that runs stages of a pipeline has ended, or no longer answers. Calls that were in flight have no answer.

    Calls fail with this error until the launcher has started the process again. The state of sequences is lost. A GPU on which an index
    was out of range computes nothing more in its process, which must be started again, too.

    Attributes:
        stages: the numbers of the stages that the process ran.
        host: the host that it ran on.
        exit_status: its exit status, negative for the number of a signal; None where it is not known.
    """

    def __init__(
        self, message: str, *, stages: tuple[int, ...] = (), host: str = "", exit_status: int | None = None
    ) -> None:
        super().__init__(message)
        self.stages = stages
        self.host = host
        self.exit_status = exit_status


class ClosedError(StageLostError):
    """The pipeline is closed: nothing answers its calls any more. Load the bundle again."""


class NotABundleError(StagepackError):
    """The path is not a bundle: it does not exist, or has no manifest that this user can read. Correct the path, or its permissions."""


class UpdateError(StagepackError):
    """A running pipeline cannot take the weights of a bundle: its graphs are others, or weights cannot be replaced. Nothing has changed."""


class RemoteError(StagepackError):
    """A server fails: it does not answer, refuses access, or lacks a file of a remote bundle.

    The message has the URL and the reason. Chunks that were downloaded are kept: solve the reason and repeat the call. Content that
    differs from the manifest is a `DigestError` instead.
    """


class FileNotListedError(StagepackError):
    """The manifest does not list a file of this name. Choose one of `Bundle.files`."""


class EntryPointError(StagepackError):
    """The bundle has no entry point of this name, or has several and none is selected. Choose one of `Bundle.entry_points`."""


class VersionError(StagepackError):
    """The bundle has a newer major version, or needs a feature that this version of stagepack does not know. Upgrade stagepack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One broken rule of the format.

    Attributes:
        rule: its number in ``schema/SPEC.md``, such as ``"G3"``.
        where: the file or the field of the bundle that breaks it.
        message: what was expected and what was found.
    """

    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} [{self.rule}]"


_SHOWN_PROBLEMS = 20


class FormatError(StagepackError):
    """The bundle breaks rules of the format. Do not use it; ask its author for a correct one.

    Attributes:
        problems: all broken rules that were found, at least one. The message shows the first 20.
    """

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems[:_SHOWN_PROBLEMS]]
        if len(self.problems) > len(lines):
            lines.append(f"and {len(self.problems) - len(lines)} more")
        super().__init__("; ".join(lines))


class DigestError(FormatError):
    """A file differs from the manifest: it is missing, truncated or changed. Copy or download the bundle again."""


class SignatureError(StagepackError):
    """The bundle has no signature that the caller requires. Do not use it; ask its author for a signed one.

    Attributes:
        reason: ``"unsigned"``: it has no signature. ``"malformed"``: ``model.sig`` is not a signature. ``"untrusted"``: no trusted signer
            made the signature, or it was changed. ``"expired"``: a certificate of the signer is not valid now. ``"changed"``: the manifest
            is not the one that was signed. ``"files"``: files of the bundle are not signed.
    """

    def __init__(self, message: str, *, reason: SignatureReason) -> None:
        super().__init__(message)
        self.reason = reason


class LimitError(FormatError):
    """A size or a nesting depth exceeds the limits of ``stagepack/format/limits.py``, so the file is not read.

    A bundle that stagepack wrote never does. Treat it like any other `FormatError`.
    """


class EvaluationModeWarning(UserWarning):
    """A bundle that is trained was exported in evaluation mode: it has no dropout, and its batch norms use their running statistics.

    Export the model in training mode to train it so, or ignore the warning if this is intended.
    """


class MicrobatchWarning(UserWarning):
    """Rows of a batch meet in a model that is trained, so that its gradients differ from the gradients of the whole batch.

    The message names the operator, such as a batch norm in training mode, which computes its statistics for each microbatch. They are the
    gradients that one process accumulates over the microbatches. Give ``microbatches=1`` to train with the whole batch, or ignore the
    warning if this is intended.
    """


@contextlib.contextmanager
def named_errors(location: str) -> Iterator[None]:
    """Let each `StagepackError` in the context begin with the name of a bundle.

    Unless it does already, begins with a process, or is about this installation.

    location: the path or URL of the bundle; nothing to leave errors as they are.
    """
    try:
        yield
    except MissingPackageError:
        raise
    except StagepackError as error:
        if location and not error.origin and not str(error).startswith(tuple(location + mark for mark in ":#/")):
            error.args = (f"{location}: {error}", *error.args[1:])
        raise


def first_line(error: object) -> str:
    """Return the first line of the message of an error, without the traces that torch and others add to it."""
    return str(error).partition("\n")[0]


def repeated_error(error: Error) -> Error:
    """Return an error like another one, for a further caller who meets it: each has a traceback of its own."""
    duplicate = type(error).__new__(type(error))
    duplicate.args = error.args
    duplicate.__dict__.update(error.__dict__)
    return duplicate
