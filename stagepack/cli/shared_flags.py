"""The arguments and options that several subcommands take, and what the subcommands do with them."""

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import click

from stagepack.capture.imports import import_user_module
from stagepack.capture.torch_messages import describe_error
from stagepack.cli.command import (
    BundleType,
    Number,
    OutputFolderType,
    PathType,
    argument,
    either,
    flag,
    flag_of,
    is_given,
    only_with,
    option_object,
)
from stagepack.cli.failures import Failure, fail
from stagepack.documents import Listed
from stagepack.extras import require_extras
from stagepack.format import limits
from stagepack.format.reader import Bundle
from stagepack.opening import open_bundle, opened_listed
from stagepack.remote.url import BundleUrl, is_url, split_entry_point
from stagepack_loaders.options import LoadOptions, ProcessOptions

if TYPE_CHECKING:
    from stagepack.capture.stated_inputs import Example
    from stagepack.partition.cut_options import CutOptions, Stages

Dtype = Literal["float64", "float32", "float16", "bfloat16"]

JSON = flag("--json", "Print JSON instead of text.")
OUT_BUNDLE = flag("-o, --out FOLDER", "Bundle to write.", required=True, type=OutputFolderType())
OUT_FOLDER = flag("-o, --out FOLDER", "Folder to write; it must not exist.", required=True, type=OutputFolderType())
OVERWRITE = flag("--overwrite", "Replace an existing file.")
DTYPE = flag(
    "--dtype DTYPE",
    "For a Hugging Face folder or hub name: convert the weights to float64, float32, float16 or bfloat16.",
    default_text="the dtype of the checkpoint",
)
ALLOW_OPS = flag_of(LoadOptions, "allow_ops")
PROFILE = flag(
    "--profile DEVICE|FILE",
    "Device that the times are of: a10, a100, b200, h100, h200, l4, l40s, mi300x, t4 or v100, whose memory also limits the stages "
    "unless --memory is given; or a file of 'stagepack profile' with measured times of the model's operators.",
    default_text="a device of 50 TFLOP/s",
)


def _import_modules(
    _context: click.Context, _option: click.Parameter, module_names: tuple[str, ...]
) -> tuple[str, ...]:
    """Import the modules that the caller names, with the current folder on the path, as ``python -m`` does."""
    for module_name in module_names:
        if module_name.endswith(".py"):
            module = module_name.removesuffix(".py").replace("/", ".").strip(".")
            raise Failure(
                f"--import {module_name}: expected the name of a module, found a file: write it without .py: --import {module}"
            )
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output is for our facts alone
                import_user_module(module_name)
        except (Exception, SystemExit) as error:
            raise Failure(f"--import {module_name}: {describe_error(error)}") from error
    return module_names


# An eager option: a module may register the runtime that another option names.
IMPORTS = flag_of(ProcessOptions, "imports", is_eager=True, callback=_import_modules)
RTOL = flag(
    "--rtol R",
    "Difference from the expected results that is allowed relative to each value.",
    default_text="by dtype",
    type=Number(min=0.0),
)
ATOL = flag(
    "--atol A",
    "Absolute difference that is allowed in addition.",
    default_text="by dtype",
    type=Number(min=0.0),
)


# `open_argument` reads these two; the second one is the field `trusted_files`.
DIGEST = flag(
    "--digest HEX",
    "Refuse a bundle of another digest, which 'stagepack inspect' prints. Without it, the manifest that a URL has is trusted.",
    default_text="any",
)
SIGNATURE = flag(
    "--require-signature PEM",
    "Refuse a bundle that is not signed by a trusted signer: PEM is a file with its public key, or with certificates of "
    "authorities. Repeatable: one of them must verify the signature. Requires --verify full.",
    default_text="not required",
    type=PathType(),
)


DELTAS = flag(
    "--delta STEP",
    "Take the bundle that this delta makes of it; nothing is written. Repeatable: each is on the result of the one before.",
    default_text="none",
    type=BundleType(),
)


@option_object
class BundleOptions:
    """The bundle that a command reads."""

    bundle_path: str = argument("BUNDLE", type=BundleType())
    digest: str | None = DIGEST


def open_argument(bundle_path: str, *extras: str) -> Bundle:
    """Open the bundle at a path or URL of the command line."""
    deltas = given_deltas()
    require_packages([bundle_path, *deltas], *extras)
    return open_bundle(bundle_path, digest=given_digest(), require_signature=given_trusted_files(), deltas=deltas)


def open_listed_argument(path: str, *extras: str) -> Listed:
    """Open the bundle, the delta or the adapter at a path or URL of the command line."""
    if given_deltas() or given_trusted_files():
        return open_argument(path, *extras)
    require_packages([path], *extras)
    return opened_listed(path, digest=given_digest())


def given_deltas() -> tuple[str, ...]:
    """Return the values of `--delta`, if it is on the command line."""
    deltas: tuple[str, ...] = click.get_current_context().params.get("delta_paths") or ()
    return deltas


def require_packages(bundle_paths: Iterable[str], *extras: str) -> None:
    """Refuse a command if packages of several of its extras are missing, among them those that open its bundles."""
    remote = ["remote"] if any(map(is_url, bundle_paths)) else []
    require_extras(*extras, *remote, *(["sign"] if given_trusted_files() else []))


def given_digest() -> str | None:
    """Return the value of `--digest`, if it is on the command line."""
    digest: str | None = click.get_current_context().params.get("digest")
    return digest


def given_trusted_files() -> tuple[str, ...] | None:
    """Return the values of `--require-signature`, if it is on the command line."""
    values = click.get_current_context().params
    trusted_files: tuple[str, ...] | None = values.get("trusted_files") or None
    if trusted_files is not None and values["verify"] != "full":
        raise click.UsageError(
            "--require-signature requires --verify full: the signature is over the digests of all files"
        )
    return trusted_files


def check_stage_number(stage_number: int, bundle: Bundle) -> None:
    """Refuse a `--stage` that the bundle does not have."""
    if not 0 <= stage_number < len(bundle.stages):
        raise Failure(f"--stage: expected a stage from 0 to {len(bundle.stages) - 1}, found {stage_number}")


def refuse_url(bundle_path: str, reason: str) -> None:
    """Fail if a bundle that is written into is at a URL."""
    if is_url(bundle_path):
        fail(f"{bundle_path}: {reason}: download it first: stagepack pull {bundle_path} -o FOLDER")


def bundle_folder_name(location: str) -> str:
    """Return the name of the folder of a bundle at a path or URL, without the name of an entry point."""
    location = os.fspath(split_entry_point(location)[0])
    return BundleUrl.parse(location).name if is_url(location) else Path(location).resolve().name


def default_model_name(bundle_path: str) -> str:
    """Return the name by which clients call a bundle: the name of its folder without ``.stagepack``, and after ``_`` its entry point."""
    folder = bundle_folder_name(bundle_path).removesuffix(".stagepack")
    _, entry_point = split_entry_point(bundle_path)
    return folder if entry_point is None else f"{folder}_{entry_point}"


def check_output_folder(out: str | os.PathLike[str]) -> None:
    """Fail if a folder cannot be created because a file is in its place, or in the place of one of its parents."""
    for path in (Path(out), *Path(out).parents):
        if path.is_dir():
            return
        if os.path.lexists(path):
            fail(f"{out}: expected a folder at {path}, found a file: choose another folder")


@option_object
class ExampleFlags:
    """The options that state the call that is captured."""

    # What the options are called where a command refuses them.
    NAMES: ClassVar[str] = "--inputs, --input, --dynamic, --eval and --train"

    function_name: str | None = flag(
        "--inputs FILE.py:FUNCTION",
        "Function that returns the example inputs: a tuple by position, a dict by name, or stagepack.Inputs.",
        default_text="those that SOURCE returns",
    )
    texts: tuple[str, ...] = flag(
        "--input NAME=INPUT",
        "An example input, such as x=float32[batch=2..512,64], where batch may change, x=float32[3,4*h,2*w+1], n=3, mask=none, x=@x.npy "
        "or @inputs.npz; of a Hugging Face model of images also @image.png. Repeatable.",
    )
    dynamic: tuple[str, ...] = flag(
        "--dynamic NAME:AXIS[=SYMBOL]",
        "Size of an input that may change, such as x:0=batch, x:0=batch=2..512 or x:0=4*h; NAME alone for a whole number. Repeatable.",
    )
    mode: Literal["eval", "train"] | None = either(
        flag("--eval", "Put the model into evaluation mode, as model.eval() does.", flag_value="eval"),
        flag(
            "--train",
            "Put the model into training mode, as model.train() does, such as one with dropout that is to be trained as a bundle.",
            flag_value="train",
        ),
    )

    def __post_init__(self) -> None:
        if self.function_name is not None and self.texts:
            raise click.UsageError("--inputs and --input cannot be used together")

    @property
    def is_used(self) -> bool:
        """Whether one of the options is on the command line."""
        return self.function_name is not None or self.mode is not None or bool(self.texts or self.dynamic)

    def example(self) -> "Example":
        """Return what the options say. Imports torch."""
        from stagepack.capture.stated_inputs import Example  # noqa: PLC0415 - torch, see above

        training = None if self.mode is None else self.mode == "train"
        return Example(function=self.function_name, texts=self.texts, dynamic=self.dynamic, training=training)


class _StagesType(click.IntRange):
    """A number of stages, or the word for a stage for each layer."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or the word."""
        if value == "layers":
            return value
        if not str(value).strip().removeprefix("-").isdecimal():
            self.fail(f"{value!r} is neither a number nor 'layers'.", param, ctx)
        return super().convert(value, param, ctx)


@option_object
class CutFlags:
    """The options that say how to cut a model."""

    # Whether the subcommand shows the times of any cut. Elsewhere a profile only chooses among the cuts into a number of stages.
    shows_times: ClassVar[bool] = False

    stages: "Stages | None" = flag(
        "--stages N|layers",
        "Cut into N stages so that the slowest stage is as fast as possible; or into a stage for each layer.",
        type=_StagesType(1, limits.STAGES),
    )
    split_modules: tuple[str, ...] = flag(
        "--split-at MODULE",
        "Start a new stage at this module of the model, such as layers.8. Repeatable.",
        default_text="none",
    )
    plan_file: str | None = flag(
        "--plan FILE",
        "Cut as described in a plan file, written by 'stagepack plan --out'.",
        default_text="none",
        type=PathType(),
    )
    memory_sizes: tuple[str, ...] = only_with(
        flag(
            "--memory SIZE",
            "Memory of the device of each stage in order, such as 24GiB, 24GB or a number of bytes. "
            "Repeat it for each stage. Requires --stages.",
            default_text="unlimited",
        ),
        "--stages",
    )
    speeds: tuple[float, ...] = only_with(
        flag(
            "--speed FACTOR",
            "Relative speed of the device of each stage in order: 2 is twice as fast as 1. Repeat it for each stage. Requires --stages.",
            default_text="1 for each stage",
        ),
        "--stages",
    )
    profile_names: tuple[str, ...] = PROFILE
    weight_sharing: Literal["replicate", "transmit"] = flag(
        "--shared",
        "What happens to a weight that several stages use: replicate loads it in each of them, transmit loads it in the first "
        "one, which sends it to the others in each call.",
        default="replicate",
    )

    def __post_init__(self) -> None:
        used_flags = self._used_ways()
        if len(used_flags) > 1:
            raise click.UsageError(f"{' and '.join(used_flags)} cannot be used together")
        if self.plan_file is not None and is_given("weight_sharing"):
            raise click.UsageError("--shared and --plan cannot be used together: the plan says how weights are shared")
        if (self.memory_sizes or self.speeds) and self.stages is not None and not isinstance(self.stages, int):
            raise click.UsageError("--memory and --speed require a number of --stages")
        if self.profile_names and self.stages is None and not self.shows_times:
            raise click.UsageError("--profile requires --stages")

    def _used_ways(self) -> list[str]:
        ways = {"--stages": self.stages is not None, "--split-at": self.split_modules, "--plan": self.plan_file}
        return [way for way, is_used in ways.items() if is_used]

    def check_recut(self) -> None:
        """Refuse options for a cut of a bundle that do not say where to cut it."""
        if is_given("weight_sharing") and not self.has_way:
            raise click.UsageError("--shared requires --stages or --split-at for a bundle")

    @property
    def has_way(self) -> bool:
        """Whether one of the options says where to cut."""
        return bool(self._used_ways())

    def cut_options(self) -> "CutOptions":
        """Return what the options say. Imports numpy."""
        if len(self.profile_names) > 1:
            raise click.UsageError("--profile: expected one, found several")
        from stagepack.partition.cut_options import CutOptions, read_plan  # noqa: PLC0415 - numpy, after the checks

        return CutOptions(
            stages=self.stages,
            split_at=self.split_modules,
            plan=None if self.plan_file is None else read_plan(self.plan_file),
            memory=self.memory_sizes,
            speeds=self.speeds,
            profile=self.profile_names[0] if self.profile_names else None,
            shared=self.weight_sharing,
        )
