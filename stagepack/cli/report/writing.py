"""The report of a bundle, as a file: the function `stagepack.report`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from stagepack.cli.report.page import bundle_page
from stagepack.errors import OptionError
from stagepack.format.output_file import check_output_file, output_file
from stagepack.format.reader import Bundle
from stagepack.opening import BundleSource, opened

if TYPE_CHECKING:
    from stagepack.partition.device_profile import DeviceProfile
    from stagepack.partition.profile import Profile
    from stagepack_loaders.run_trace import RunTrace


def write_report(
    bundle: BundleSource,
    *,
    out: str | os.PathLike[str],
    profile: "Profile | DeviceProfile | str | os.PathLike[str] | None" = None,
    trace: "RunTrace | None" = None,
    overwrite: bool = False,
) -> Path:
    """Write a report about a bundle as one HTML page, which requests nothing from the network. Needs no torch.

    Args:
        bundle: the folder of the bundle, its URL, or an opened bundle.
        out: the file to write; it must not exist unless `overwrite` is true.
        profile: the device that the times are of, such as ``"h100"``; or measured times of its nodes, from `stagepack.read_profile`, or
            their file.
        trace: a run of the bundle, from `Pipeline.trace`, which is drawn beside the estimate.
        overwrite: replace a file that exists at `out`.

    Returns:
        The path of the file.

    Raises:
        OutputExistsError: `out` exists and `overwrite` is false.
        OptionError: the trace is of another bundle, or of no stage.
        CutError: the bundle contains no plan, or the profile is of another model.
        WriteError: the file cannot be written, or would be inside a bundle.
        DigestError, FormatError: the bundle is damaged.

    Examples:
        >>> stagepack.report("m.stagepack", out="m.html")
    """
    check_output_file(out, overwrite=overwrite)
    opened_bundle = opened(bundle)
    if trace is not None:
        opened_bundle.entry_point  # noqa: B018 - a trace is of one: it raises if none is selected
        _check_trace(trace, opened_bundle)
    html = bundle_page(opened_bundle, profile, trace)
    with output_file(out) as path:
        path.write_text(html, encoding="utf-8")
    return Path(out)


def _check_trace(trace: "RunTrace", bundle: Bundle) -> None:
    if trace.bundle != bundle.identity:
        raise OptionError(
            f"trace: expected a run of {bundle.location} ({bundle.digest[:12]}), found one of "
            f"{trace.bundle[:12] or 'another bundle'}"
        )
    if all(span.kind != "compute" or span.stage is None for span in trace.spans):
        raise OptionError("trace: expected a run of at least one stage, found none")
    if any(span.stage is not None and span.stage >= len(bundle.stages) for span in trace.spans):
        raise OptionError(f"trace: expected the stages 0 to {len(bundle.stages) - 1}, found others")
