"""`stagepack export`."""

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from stagepack.bundle_assets import exported_assets, read_assets
from stagepack.capture.model_folders import check_source_path
from stagepack.cli.bundle_facts import bundle_facts, each_entry_point, print_written
from stagepack.cli.command import subcommand
from stagepack.cli.cut_option_flags import cut_option_flags
from stagepack.cli.example_flags import example_flags
from stagepack.cli.failures import shown_warnings
from stagepack.cli.onnx_command import conversion_facts, print_conversion
from stagepack.cli.output import finite, print_json, print_line, progress
from stagepack.cli.path_options import BundleType, PathType
from stagepack.cli.run_options import dtype_option, json_option, tolerance_options
from stagepack.cli.termination import orderly_termination
from stagepack.extras import require_extras
from stagepack.format.reader import Bundle, bundle_permissions
from stagepack.format.writer import check_output_path

if TYPE_CHECKING:
    from stagepack.capture.stated_inputs import ExampleArguments
    from stagepack.partition.cut_options import CutOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flags:
    """The options of the command; their help has what they mean."""

    make_cut_options: "Callable[[], CutOptions] | None"
    make_example: "Callable[[], ExampleArguments] | None"
    weights: str | None
    graph_from: str | None
    parts: tuple[str, ...]
    generate: int | None
    generate_batch: int
    assets: tuple[str, ...]
    dtype: str | None
    allow_ops: tuple[str, ...]
    strict: bool
    allow_difference: bool
    with_onnx: bool
    rtol: float | None
    atol: float | None
    overwrite: bool
    as_json: bool


@subcommand(
    "export",
    examples=[
        "stagepack export net.py:make_model -o net.stagepack --stages 4",
        "stagepack export net.py:Net --input 'x=float32[n=1..64,8]' -o n.stagepack",
        "stagepack export net.pt2 -o net.stagepack --split-at layers.4",
        "stagepack export ./llama -o llama.stagepack --stages 2 --onnx",
        "stagepack export ./llama -o llama.stagepack --dtype bfloat16",
        "stagepack export ./llama -o llama.stagepack --stages 4 --generate 2048",
        "stagepack export ./clip -o clip.stagepack --part text_model",
        "stagepack export net.py:make --weights net.safetensors -o net.stagepack",
        "stagepack export ./tuned --graph-from old.stagepack -o new.stagepack",
    ],
)
@click.argument("source")
@click.option("-o", "--out", required=True, type=PathType(), metavar="FOLDER", help="Bundle to write.")
@example_flags
@click.option(
    "--weights",
    type=PathType(),
    metavar="CHECKPOINT",
    help="Weights of the module that SOURCE makes: a .safetensors or .bin file, an index of such files, or a torch DCP folder.",
)
@click.option(
    "--graph-from",
    type=BundleType(),
    metavar="BUNDLE",
    help="Bundle of the same model with other weights; nothing is captured. SOURCE is then a checkpoint, or a Hugging Face folder or name.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    metavar="MODULE",
    show_default="the whole model",
    help="Export this module of the model, such as text_model, with the inputs that it gets when the model runs its example. Repeatable: "
    "each becomes an entry point.",
)
@click.option(
    "--generate",
    type=click.IntRange(6),
    metavar="POSITIONS",
    help="Of a language or speech model of transformers: a key-value cache of so many positions becomes state, and the bundle generates.",
)
@click.option(
    "--generate-batch",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="With --generate: the number of texts that the cache holds.",
)
@click.option(
    "--asset",
    "assets",
    multiple=True,
    type=PathType(),
    metavar="FILE",
    help="Further file for the bundle, such as tokenizer.json: 'stagepack serve' reads texts with it. Those of a Hugging Face model are "
    "taken without it. Repeatable.",
)
@dtype_option
@click.option(
    "--allow-ops",
    multiple=True,
    metavar="NAME",
    help="With --graph-from: namespace of custom operators, or operator of ATen or prims that does not run by default, that may run.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Capture with strict=True of torch.export.export, which traces the Python code in the place of running it.",
)
@click.option(
    "--allow-difference",
    is_flag=True,
    help="Write a model whose captured program answers otherwise than the model does; the bundle answers as the program does.",
)
@cut_option_flags
@click.option("--onnx", "with_onnx", is_flag=True, help="Also add ONNX files, as 'stagepack onnx' does.")
@tolerance_options
@click.option("--overwrite", is_flag=True, help="Replace an existing bundle.")
@json_option
def command(source: str, out: str, **arguments: Any) -> None:
    """Write a model as a bundle.

    SOURCE is FILE.py:FUNCTION, package.module:FUNCTION, a .pt2 file, or a Hugging Face folder or hub name. FUNCTION takes no arguments
    and returns a torch.nn.Module, or a module and its example inputs. A dict of stagepack.Inputs, by paths of methods and modules such as
    encode and vae.decode, makes a bundle with an entry point for each.

    Without a cut option, the model is cut where its code calls stagepack.split_here(); without such calls it becomes one stage. The
    bundle is loaded before it has its name, and its answer to the example is compared with that of the model: a bundle that no loader
    accepts, or that answers otherwise, is not written.

    With --graph-from, a fine-tuned checkpoint becomes a bundle without a capture: the graphs, the example inputs and the cut are those of
    the bundle, and names, shapes and dtypes of the weights are compared.

    The weights of a Hugging Face model and those of --weights go from their files to the bundle one after the other, so that a model may
    be larger than the memory.

    This runs the code of SOURCE. torch reads parts of a .pt2 file and of a DCP folder with pickle, so they can run code too: export only
    files that you trust.
    """
    flags = _Flags(**arguments)
    if flags.graph_from is not None and any(
        (flags.make_cut_options, flags.make_example, flags.weights, flags.dtype, flags.parts, flags.assets)
    ):
        raise click.UsageError(
            "--graph-from takes the inputs, the dtypes, the cut and the assets from the bundle: leave out the other options"
        )
    if flags.generate is not None and (flags.graph_from or flags.make_example or flags.weights or flags.parts):
        raise click.UsageError(
            "--generate makes the inputs itself: leave out --inputs, --input, --dynamic, --weights, --part and --graph-from"
        )
    if (flags.rtol, flags.atol) != (None, None) and not flags.with_onnx:
        raise click.UsageError("--rtol and --atol require --onnx")
    check_output_path(out, overwrite=flags.overwrite)
    if flags.graph_from is None:
        check_source_path(source)
    asset_contents = read_assets(flags.assets)
    is_pretrained = ":" not in source and not source.endswith(".pt2")
    require_extras("torch", *(["hf"] if is_pretrained else []), *(["onnx", "onnxruntime"] if flags.with_onnx else []))
    start_time = time.perf_counter()
    # The output of the model's own code goes to standard error: standard output is for our facts alone.
    with (
        progress("importing torch") as next_step,
        contextlib.redirect_stdout(sys.stderr),
        orderly_termination(),
        shown_warnings(),
    ):
        from stagepack.capture.generation import capture_generating  # noqa: PLC0415 - torch, slow to import
        from stagepack.capture.pretrained_model import model_files  # noqa: PLC0415 - the same
        from stagepack.capture.programs import strict_captures  # noqa: PLC0415 - the same
        from stagepack.capture.source import NO_EXAMPLE, capture_source_argument  # noqa: PLC0415 - the same
        from stagepack.exporter import ExportOptions, export_captures  # noqa: PLC0415 - the same
        from stagepack.partition.cut_options import CutOptions  # noqa: PLC0415 - the same
        from stagepack.weight_replacement import replace_weights  # noqa: PLC0415 - the same

        differences: list[float] = []
        if flags.with_onnx:
            from stagepack.onnx import add_onnx, added_to_new_bundle  # noqa: PLC0415 - packages that only this option needs
        if flags.graph_from is not None:
            method = f"the graphs of {flags.graph_from}"
            bundle = replace_weights(
                flags.graph_from,
                source,
                out=out,
                allow_ops=flags.allow_ops,
                overwrite=flags.overwrite,
                progress=next_step,
            )
        else:
            cut_options = CutOptions() if flags.make_cut_options is None else flags.make_cut_options()
            next_step("capturing the model")
            if flags.generate is None:
                example = NO_EXAMPLE if flags.make_example is None else flags.make_example()
                with strict_captures(flags.strict):
                    captures = capture_source_argument(source, example, flags.weights, flags.dtype, flags.parts)
            else:
                captures, files = capture_generating(source, flags.generate, flags.generate_batch, flags.dtype)
                asset_contents = {**files, **asset_contents}
            # Those of a pipeline say more than the files of its folder, such as how texts are cut.
            asset_contents = {**model_files(next(iter(captures.values())).model), **asset_contents}
            method = " and ".join(dict.fromkeys(capture.method for capture in captures.values()))
            bundle = export_captures(
                captures,
                out=out,
                cut_options=dict.fromkeys(captures, cut_options),
                options=ExportOptions(
                    assets=exported_assets(source, asset_contents, generates=flags.generate is not None),
                    overwrite=flags.overwrite,
                    allow_difference=flags.allow_difference,
                    progress=next_step,
                    compared=differences.append,
                ),
            )
        onnx_facts: list[dict[str, Any]] = []
        if flags.with_onnx:
            for selected in each_entry_point(bundle):
                with added_to_new_bundle(bundle):
                    conversion = add_onnx(
                        Bundle(selected.path).select(selected.entry_point.name),
                        allow_ops=bundle_permissions(selected),
                        rtol=flags.rtol,
                        atol=flags.atol,
                        progress=next_step,
                    )
                onnx_facts += conversion_facts(conversion)
            bundle = Bundle(bundle.path)
    seconds = round(time.perf_counter() - start_time, 3)
    # A bundle that gave its graphs has recorded no other answer than its own.
    measured = {} if flags.graph_from is not None else {"difference": finite(max(differences, default=0.0))}
    run_fields = {"captured_by": method, **measured, "seconds": seconds}
    facts = bundle_facts(bundle) | ({"onnx": onnx_facts} if flags.with_onnx else {}) | run_fields
    if flags.as_json:
        print_json(facts)
    else:
        _print_export(source, bundle, out, facts)


def _print_export(source: str, bundle: Bundle, out: str, facts: dict[str, Any]) -> None:
    """Print for people what was exported."""
    print_line(f"captured {source} ({facts['captured_by']})")
    print_written(bundle, out, facts["seconds"])
    if "difference" in facts:
        difference = "the shapes or types differ" if facts["difference"] is None else f"{facts['difference']:g}"
        print_line(f"replayed the example: largest difference from the model {difference}")
    else:
        print_line("recorded the answer of the new stages to the example; the model of the weights was not run")
    if "onnx" in facts:
        print_conversion(facts["onnx"])
