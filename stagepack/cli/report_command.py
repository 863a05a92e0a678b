"""`stagepack report`."""

from pathlib import Path

from stagepack.cli.command import PathType, flag, option_object, subcommand
from stagepack.cli.output import print_line
from stagepack.cli.report_page import write_report
from stagepack.cli.shared_flags import OVERWRITE, PROFILE, BundleOptions, open_argument
from stagepack.format.output_file import is_standard_output
from stagepack.format.quantities import format_bytes


@option_object
class _Options(BundleOptions):
    out: Path = flag("-o, --out FILE", "HTML file to write.", required=True)
    trace_file: str | None = flag(
        "--trace FILE",
        "Also show the idle time of a run of the bundle, which 'stagepack load --trace' has traced, beside the estimate.",
        default_text="none",
        type=PathType(),
    )
    profile_name: str | None = PROFILE
    overwrite: bool = OVERWRITE


@subcommand(
    "report",
    examples=[
        "stagepack report net.stagepack -o net.html",
        "stagepack load net.stagepack --processes 2 --trace run.json",
        "stagepack report net.stagepack -o net.html --trace run.json",
    ],
)
def command(options: _Options) -> None:
    """Write a report about a bundle as an HTML page.

    The page has tables of the stages, the edges between them, the balance, the pipeline bubble and all nodes, and a flowchart in Mermaid.
    It is one file that requests nothing from the network. Needs no torch.
    """
    bundle = open_argument(options.bundle_path)
    trace = None
    if options.trace_file is not None:
        from stagepack_loaders.run_trace import read_trace  # noqa: PLC0415 - only this option needs it

        trace = read_trace(options.trace_file)
    write_report(bundle, out=options.out, profile=options.profile_name, trace=trace, overwrite=options.overwrite)
    if not is_standard_output(options.out):
        print_line(f"wrote {options.out}: {format_bytes(options.out.stat().st_size)}")
