"""`stagepack export`."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from stagepack.bundle_assets import exported_assets, read_assets
from stagepack.capture.model_folders import check_source_path
from stagepack.cli.bundle_facts import bundle_facts, print_written
from stagepack.cli.command import BundleType, PathType, argument, flag, option_object, subcommand
from stagepack.cli.failures import shown_warnings
from stagepack.cli.onnx_command import conversion_facts, print_conversion
from stagepack.cli.output import finite, print_json, print_line, progress
from stagepack.cli.shared_flags import ATOL, DTYPE, JSON, OUT_BUNDLE, RTOL, CutFlags, Dtype, ExampleFlags
from stagepack.cli.termination import orderly_termination
from stagepack.extras import require_extras
from stagepack.format.reader import Bundle
from stagepack.format.writer import check_output_path
from stagepack_loaders.comparison import Tolerance, format_difference


@option_object
class _Options:
    source: str = argument()
    out: str = OUT_BUNDLE
    example: ExampleFlags
    weights: str | None = flag(
        "--weights CHECKPOINT",
        "Weights of the module that SOURCE makes: a .safetensors or .bin file, an index of such files, or a torch DCP folder.",
        type=PathType(),
    )
    graph_from: str | None = flag(
        "--graph-from BUNDLE",
        "Bundle of the same model with other weights; nothing is captured. SOURCE is then a checkpoint, or a Hugging Face folder or name.",
        type=BundleType(),
    )
    parts: tuple[str, ...] = flag(
        "--part MODULE",
        "Export this module of the model, such as text_model, with the inputs that it gets when the model runs its example. Repeatable: "
        "each becomes an entry point.",
        default_text="the whole model",
    )
    generate: int | None = flag(
        "--generate POSITIONS",
        "Of a language or speech model of transformers: a key-value cache of so many positions becomes state, and the bundle generates.",
        type=click.IntRange(6),
    )
    generate_batch: int = flag(
        "--generate-batch N",
        "With --generate: the number of texts that the cache holds, which a server generates at once. On a CPU, memory is taken where "
        "texts are written; on a GPU, for all of them.",
        type=click.IntRange(1),
        default=8,
    )
    assets: tuple[str, ...] = flag(
        "--asset FILE",
        "Further file for the bundle, such as tokenizer.json: 'stagepack serve' reads texts with it. Those of a Hugging Face model are "
        "taken without it. Repeatable.",
        type=PathType(),
    )
    dtype: Dtype | None = DTYPE
    allow_ops: tuple[str, ...] = flag(
        "--allow-ops NAME",
        "With --graph-from: namespace of custom operators, or operator of ATen or prims that does not run by default, that may run.",
    )
    strict: bool = flag(
        "--strict",
        "Capture with strict=True of torch.export.export, which traces the Python code in the place of running it.",
    )
    allow_difference: bool = flag(
        "--allow-difference",
        "Write a model whose captured program answers otherwise than the model does; the bundle answers as the program does.",
    )
    cut: CutFlags
    with_onnx: bool = flag("--onnx", "Also add ONNX files, as 'stagepack onnx' does.")
    rtol: float | None = RTOL
    atol: float | None = ATOL
    overwrite: bool = flag("--overwrite", "Replace an existing bundle.")
    as_json: bool = JSON


@subcommand(
    "export",
    examples=[
        "stagepack export net.py:make_model -o net.stagepack --stages 4",
        "stagepack export net.py:Net --eval --input 'x=float32[n,8]' -o n.stagepack",
        "stagepack export net.pt2 -o net.stagepack --split-at layers.4",
        "stagepack export ./llama -o llama.stagepack --stages 2 --onnx",
        "stagepack export ./llama -o llama.stagepack --dtype bfloat16",
        "stagepack export ./llama -o llama.stagepack --stages 4 --generate 2048",
        "stagepack export ./clip -o clip.stagepack --part text_model",
        "stagepack export net.py:make --weights net.safetensors -o net.stagepack",
        "stagepack export ./tuned --graph-from old.stagepack -o new.stagepack",
    ],
)
def command(options: _Options) -> None:
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
    _check_usage(options)
    asset_contents = read_assets(options.assets)
    is_pretrained = ":" not in options.source and not options.source.endswith(".pt2")
    onnx_extras = ["onnx", "onnxruntime"] if options.with_onnx else []
    require_extras("torch", *(["hf"] if is_pretrained else []), *onnx_extras)
    start_time = time.perf_counter()
    # The output of the model's own code goes to standard error: standard output is for our facts alone.
    with (
        progress("importing torch") as next_step,
        contextlib.redirect_stdout(sys.stderr),
        orderly_termination(),
        shown_warnings(),
    ):
        if options.with_onnx:
            # Before a bundle is written, which a package that cannot be imported would leave without ONNX files.
            from stagepack.onnx import add_onnx_to_new_bundle  # noqa: PLC0415 - packages that only this option needs
        bundle, run_facts = _write(options, asset_contents, next_step)
        if options.with_onnx:
            results = add_onnx_to_new_bundle(bundle, Tolerance(options.rtol, options.atol), next_step)
            onnx_facts = [stage_facts for added in results for stage_facts in conversion_facts(added)]
            run_facts = {"onnx": onnx_facts} | run_facts
            bundle = Bundle(bundle.path)
    seconds = round(time.perf_counter() - start_time, 3)
    facts = bundle_facts(bundle) | run_facts | {"seconds": seconds}
    if options.as_json:
        print_json(facts)
    else:
        _print_export(options, bundle, facts)


def _check_usage(options: _Options) -> None:
    """Refuse options that do not go together, and paths that cannot be read or written."""
    makes_inputs = options.example.is_used or options.weights or options.parts
    if options.graph_from is not None and (makes_inputs or options.cut.is_used or options.dtype or options.assets):
        raise click.UsageError(
            "--graph-from takes the inputs, the dtypes, the cut and the assets from the bundle: leave out the other options"
        )
    if options.generate is not None and (makes_inputs or options.graph_from):
        raise click.UsageError(
            f"--generate makes the inputs itself: leave out {ExampleFlags.NAMES}, --weights, --part and --graph-from"
        )
    if (options.rtol, options.atol) != (None, None) and not options.with_onnx:
        raise click.UsageError("--rtol and --atol require --onnx")
    check_output_path(options.out, overwrite=options.overwrite)
    if options.graph_from is None:
        check_source_path(options.source)


def _write(
    options: _Options, asset_contents: Mapping[str, bytes], next_step: Callable[[str], None]
) -> tuple[Bundle, dict[str, Any]]:
    """Write the bundle; return it, with how it was captured and how far its answer is from that of the model."""
    from stagepack.capture.generation import capture_generating  # noqa: PLC0415 - torch, slow to import
    from stagepack.capture.pretrained_model import model_files  # noqa: PLC0415 - the same
    from stagepack.capture.programs import strict_captures  # noqa: PLC0415 - the same
    from stagepack.capture.source import capture_source_argument  # noqa: PLC0415 - the same
    from stagepack.exporter import ExportOptions, export_captures  # noqa: PLC0415 - the same
    from stagepack.weight_replacement import replace_weights  # noqa: PLC0415 - the same

    source = options.source
    if options.graph_from is not None:
        bundle = replace_weights(
            options.graph_from,
            source,
            out=options.out,
            allow_ops=options.allow_ops,
            overwrite=options.overwrite,
            progress=next_step,
        )
        # A bundle that gave its graphs has recorded no other answer than its own.
        return bundle, {"captured_by": f"the graphs of {options.graph_from}"}
    cut_options = options.cut.cut_options()
    next_step("capturing the model")
    if options.generate is None:
        with strict_captures(options.strict):
            example = options.example.example_arguments()
            captures = capture_source_argument(source, example, options.weights, options.dtype, options.parts)
    else:
        captures, files = capture_generating(source, options.generate, options.generate_batch, options.dtype)
        asset_contents = {**files, **asset_contents}
    # Those of a pipeline say more than the files of its folder, such as how texts are cut.
    asset_contents = {**model_files(next(iter(captures.values())).model), **asset_contents}
    differences: list[float] = []
    export_options = ExportOptions(
        assets=exported_assets(source, asset_contents, generates=options.generate is not None),
        overwrite=options.overwrite,
        allow_difference=options.allow_difference,
        progress=next_step,
        compared=differences.append,
    )
    bundle = export_captures(
        captures, out=options.out, cut_options=dict.fromkeys(captures, cut_options), options=export_options
    )
    method = " and ".join(dict.fromkeys(capture.method for capture in captures.values()))
    return bundle, {"captured_by": method, "difference": finite(max(differences, default=0.0))}


def _print_export(options: _Options, bundle: Bundle, facts: dict[str, Any]) -> None:
    print_line(f"captured {options.source} ({facts['captured_by']})")
    print_written(bundle, options.out, facts["seconds"])
    if "difference" in facts:
        difference = math.inf if facts["difference"] is None else facts["difference"]
        print_line(f"replayed the example: largest difference from the model {format_difference(difference)}")
    else:
        print_line("recorded the answer of the new stages to the example; the model of the weights was not run")
    if "onnx" in facts:
        print_conversion(facts["onnx"])
