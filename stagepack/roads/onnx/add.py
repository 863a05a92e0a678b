"""A bundle -> the same bundle with an ONNX model for each stage that has an ONNX form."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stagepack.errors import OptionError, StagepackError, WriteError
from stagepack.format.file_checks import FileVersion
from stagepack.format.manifest import Onnx
from stagepack.format.output_file import TemporaryFolder
from stagepack.format.reader import Bundle, bundle_permissions
from stagepack.format.writer import BundleWriter, check_output_path
from stagepack.opening import errors_name_bundle, opened_folder
from stagepack.roads.onnx.check import StageCheck, check_stages
from stagepack.roads.onnx.conversion import convert_stage, model_file, own_weight_file
from stagepack.roads.onnx.stage_model import OnnxFiles
from stagepack.torch_internals import onnx_functions_read_once, signs_of_zeros_kept
from stagepack_loaders.comparison import Tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedOnnx:
    """The result of `add_onnx`.

    Attributes:
        bundle: the bundle with the ONNX models.
        torch_only: the reason for each stage that has no ONNX model, by stage number.
        checked: for each other stage, how far its answers are from those in torch, and at which sizes, by stage number.
    """

    bundle: Bundle
    torch_only: Mapping[int, str]
    checked: Mapping[int, StageCheck]


@errors_name_bundle
def add_onnx(
    bundle: str | os.PathLike[str] | Bundle,
    *,
    allow_ops: Collection[str] = (),
    rtol: float | None = None,
    atol: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> AddedOnnx:
    """Add an ONNX model to each stage of a bundle, converted by ``torch.onnx`` from the stage itself.

    The initializers point into the weight files of the bundle: no weight is copied. Each stage then answers the example in ONNX
    Runtime, and inputs of other sizes that the bundle allows, made of the example. A stage that has no ONNX form, that ONNX Runtime
    cannot run on the CPU, or whose answer differs from that in torch by more than rounding, has no ONNX model and runs in torch only.
    A difference is allowed within a tolerance of the dtype (for float32: 1e-3 of each value, plus 1e-4). Beyond it, the stage is
    computed in float64: up to 8 times the difference of torch's own answer from the float64 answer is allowed.

    rtol: the difference that is allowed relative to each value, in place of the tolerance of the dtype, and without a float64 comparison.
        Integers must be equal all the same.
    """
    return add_onnx_within(bundle, allow_ops, Tolerance(rtol, atol), progress)


@errors_name_bundle
def add_onnx_within(
    bundle: str | os.PathLike[str] | Bundle,
    allow_ops: Collection[str],
    tolerance: Tolerance,
    progress: Callable[[str], None],
) -> AddedOnnx:
    """Add an ONNX model to each stage of a bundle; see `add_onnx`."""
    if any(bound is not None and not bound >= 0 for bound in tolerance):
        raise OptionError(
            f"rtol, atol: expected numbers that are not negative, found {tolerance.rtol} and {tolerance.atol}"
        )
    opened = opened_folder(bundle, "ONNX models").stored
    check_output_path(_resolved_path(opened), overwrite=True)
    versions = opened.check_digests(opened.files)
    conversions = {}
    with onnx_functions_read_once(), signs_of_zeros_kept():
        for stage_number in range(len(opened.stages)):
            progress(f"convert stage {stage_number}")
            conversions[stage_number] = convert_stage(opened, stage_number, allow_ops)
    refused = {stage_number: reason for stage_number, reason in conversions.items() if isinstance(reason, str)}
    converted = {stage_number: files for stage_number, files in conversions.items() if isinstance(files, OnnxFiles)}
    progress("run the example")
    stated_tolerance = None if tolerance == Tolerance() else tolerance
    checks = _check_converted(opened, converted, versions, allow_ops, stated_tolerance)
    matching = {stage_number: files for stage_number, files in converted.items() if checks[stage_number].within}
    differing = {stage_number: checks[stage_number].reason for stage_number in converted.keys() - matching.keys()}
    write_bundle(opened, matching, versions, _resolved_path(opened), replaced_digest=opened.digest)
    return AddedOnnx(
        bundle=Bundle(opened.path).select(opened.entry_point.name),
        torch_only=dict(sorted((refused | differing).items())),
        checked={stage_number: checks[stage_number] for stage_number in matching},
    )


def add_onnx_to_new_bundle(
    bundle: Bundle, tolerance: Tolerance, progress: Callable[[str], None] = lambda _: None
) -> Iterator[AddedOnnx]:
    """Add ONNX models to each entry point of a bundle that was just exported; errors say that it is written without them."""
    for entry_point in bundle.entry_points:
        # The entry point before this one has written the bundle anew.
        selected = Bundle(bundle.path).select(entry_point.name)
        try:
            yield add_onnx_within(selected, bundle_permissions(selected), tolerance, progress)
        except StagepackError as error:
            further = f"{bundle.location} is written without the ONNX models that failed: mend the cause, and run `stagepack onnx` on it"
            error.args = (f"{error}: {further}", *error.args[1:])
            raise


def _check_converted(
    bundle: Bundle,
    converted: Mapping[int, OnnxFiles],
    versions: Mapping[str, FileVersion],
    allow_ops: Collection[str],
    tolerance: Tolerance | None,
) -> list[StageCheck]:
    """Write a temporary bundle with the ONNX models, and compare the answers of all stages."""
    with _folder_beside(_resolved_path(bundle)) as folder:
        write_bundle(bundle, converted, versions, folder / "checked")
        checked_bundle = Bundle(folder / "checked").select(bundle.entry_point.name)
        return list(check_stages(checked_bundle, allow_ops, tolerance))


def _resolved_path(bundle: Bundle) -> Path:
    """The folder of a bundle, where it may have been opened by a symbolic link."""
    return bundle.path.resolve()


@contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """A temporary folder on the same file system, so that files can be linked to."""
    try:
        folder = TemporaryFolder(path)
    except OSError as error:
        raise WriteError(f"{path}: cannot write there: {error.strerror}: {path.parent}") from None
    with folder:
        yield folder.path


def write_bundle(
    bundle: Bundle,
    converted: Mapping[int, OnnxFiles],
    versions: Mapping[str, FileVersion],
    out: Path,
    *,
    replaced_digest: str | None = None,
) -> None:
    """Write a bundle with the ONNX models of these stages and no others, in the place of the bundle of a digest, if any."""
    replaced_files = {file_name for stage in bundle.stages for file_name in stage.onnx_files}
    stages = [msgspec.structs.replace(stage, onnx=None) for stage in bundle.stages]
    with BundleWriter(out, overwrite=replaced_digest is not None) as writer:
        for file in bundle.manifest.files:
            if file.name not in replaced_files:
                writer.link_file(bundle.path / file.name, file, versions[file.name])
        for stage_number, files in converted.items():
            stage = stages[stage_number]
            writer.write_file(model_file(stage), [files.model])
            if files.tensors:
                writer.write_tensors(own_weight_file(stage), files.tensors, files.read)
            onnx = Onnx(model=model_file(stage), weights=(own_weight_file(stage),) if files.tensors else ())
            stages[stage_number] = msgspec.structs.replace(stage, onnx=onnx)
        converted_entry_point = msgspec.structs.replace(bundle.entry_point, stages=tuple(stages))
        entry_points = tuple(
            converted_entry_point if entry_point.name == converted_entry_point.name else entry_point
            for entry_point in bundle.entry_points
        )
        manifest = msgspec.structs.replace(bundle.manifest, entry_points=entry_points)
        writer.finish(manifest, replaced_digest=replaced_digest)
