"""`stagepack export`."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from stagepack.capture.transformers.model_folders import check_source_path, form_of_source
from stagepack.cli.bundle_facts import bundle_facts, print_written
from stagepack.cli.command import BundleType, PathType, argument, flag, only_with, option_object, subcommand
from stagepack.cli.failures import shown_warnings
from stagepack.cli.onnx_command import conversion_facts, print_conversion
from stagepack.cli.output import finite, print_json, print_line, progress
from stagepack.cli.shared_flags import ATOL, DTYPE, JSON, OUT_BUNDLE, RTOL, CutFlags, Dtype, ExampleFlags
from stagepack.cli.termination import orderly_termination
from stagepack.errors import OptionError
from stagepack.extras import require_extras
from stagepack.format.reader import Bundle
from stagepack.format.writer import check_output_path
from stagepack.roads.assets import read_assets
from stagepack_loaders.comparison import Tolerance, format_difference

if TYPE_CHECKING:
    from stagepack.roads.export import ExportRequest


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
        "For a language or speech model of transformers: a key-value cache of POSITIONS positions becomes state, and the bundle generates.",
        type=click.IntRange(6),
    )
    generate_batch: int = only_with(
        flag(
            "--generate-batch N",
            "With --generate: the number of texts that the cache holds, which a server generates at once. On a CPU, memory is taken "
            "where texts are written; on a GPU, for all of them.",
            type=click.IntRange(1),
            default=8,
        ),
        "--generate",
    )
    assets: tuple[str, ...] = flag(
        "--asset FILE",
        "Further file for the bundle, such as tokenizer.json: 'stagepack serve' reads texts with it. The files of a Hugging Face model "
        "are added without this option. Repeatable.",
        type=PathType(),
    )
    dtype: Dtype | None = DTYPE
    allow_ops: tuple[str, ...] = only_with(
        flag(
            "--allow-ops NAME",
            "With --graph-from: namespace of custom operators, or operator of ATen or prims that does not run by default, that may run.",
        ),
        "--graph-from",
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
    rtol: float | None = only_with(RTOL, "--onnx")
    atol: float | None = only_with(ATOL, "--onnx")
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

    SOURCE is FILE.py:FUNCTION, package.module:FUNCTION, a .pt2 file, a folder that transformers' exporters wrote (each of its programs
    becomes an entry point), or a Hugging Face folder or hub name. FUNCTION takes no arguments and returns a torch.nn.Module, or a module
    and its example inputs. A dict of stagepack.Inputs, by paths of methods and modules such as encode and vae.decode, makes a bundle with
    an entry point for each.

    Without a cut option, the model is cut where its code calls stagepack.split_here(); without these calls it becomes one stage. The
    bundle is loaded from a temporary name, and its answer to the example is compared with the answer of the model. A bundle that a loader
    would refuse, or that answers otherwise, is not written.

    With --graph-from, a fine-tuned checkpoint becomes a bundle without a capture: the new bundle has the graphs, the example inputs and
    the cut of the old one. Names, shapes and dtypes of the weights are compared.

    The weights of a Hugging Face model, and of --weights, are copied from their files to the bundle one by one, so that a model may be
    larger than the memory.

    This runs the code of SOURCE. torch reads parts of a .pt2 file and of a DCP folder with pickle, so they can run code too: export only
    files that you trust.
    """
    check_output_path(options.out, overwrite=options.overwrite)
    if options.graph_from is None:
        check_source_path(options.source)
    asset_contents = read_assets(options.assets)
    is_pretrained = form_of_source(options.source) in ("pretrained", "programs")
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
        from stagepack.roads.export import write_model  # noqa: PLC0415 - torch, slow to import

        result = write_model(_request(options, asset_contents, next_step))
    facts = bundle_facts(result.bundle) | {"captured_by": result.method}
    if result.onnx:
        facts["onnx"] = [stage_facts for added in result.onnx for stage_facts in conversion_facts(added)]
    if result.difference is not None:
        facts["difference"] = finite(result.difference)
    facts["seconds"] = round(time.perf_counter() - start_time, 3)
    if options.as_json:
        print_json(facts)
    else:
        _print_export(options, result.bundle, facts)


def _request(
    options: _Options, asset_contents: Mapping[str, bytes], next_step: Callable[[str], None]
) -> "ExportRequest":
    from stagepack.roads.capture_writer import ExportOptions  # noqa: PLC0415 - torch, slow to import
    from stagepack.roads.export import ExportRequest  # noqa: PLC0415 - the same

    try:
        return ExportRequest(
            model=options.source,
            out=options.out,
            example=options.example.example(),
            modules=options.parts,
            weights=options.weights,
            graph_from=options.graph_from,
            dtype=options.dtype,
            generate=options.generate,
            generate_batch=options.generate_batch,
            cut=options.cut.cut_options(),
            with_onnx=options.with_onnx,
            tolerance=Tolerance(options.rtol, options.atol),
            strict=options.strict,
            allow_ops=options.allow_ops,
            options=ExportOptions(
                assets=asset_contents,
                overwrite=options.overwrite,
                allow_difference=options.allow_difference,
                progress=next_step,
            ),
        )
    except OptionError as error:
        raise click.UsageError(str(error)) from None


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
