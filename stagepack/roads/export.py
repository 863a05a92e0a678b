"""A model in any form that users have -> a bundle: the function `stagepack.export`."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from stagepack.capture.extensions import GeneratingModel
from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import strict_captures
from stagepack.capture.source import FORWARD, ModelSource
from stagepack.capture.stated_inputs import Example, StatedInputs
from stagepack.capture.transformers.model_folders import form_of_source
from stagepack.capture.transformers.pretrained_model import model_files
from stagepack.errors import ExportWarning, OptionError, warn_caller
from stagepack.extensions import export_option
from stagepack.format.plan import Plan
from stagepack.format.reader import Bundle
from stagepack.format.writer import check_output_path
from stagepack.partition.cut_options import CutOptions, Policy, Stages, WeightSharing
from stagepack.partition.profile import DeviceProfile, Profile
from stagepack.roads.assets import exported_assets, read_assets
from stagepack.roads.capture_writer import ExportOptions, export_captures
from stagepack.roads.replace import replace_weights
from stagepack_loaders.comparison import Tolerance

if TYPE_CHECKING:
    from stagepack.roads.onnx import AddedOnnx

DEFAULT_GENERATE_BATCH = 8
_NO_ENTRY_POINTS = "stages, split_at: a dict is for entry_points, which are missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """An export, as Python's function and the command ask for it.

    Attributes:
        model: the model, see `ModelSource.of`; with `graph_from`, a checkpoint.
        example: what is said about the call that is captured.
        cut: where to cut the model, or each of its entry points that has no cut of its own.
        cuts: where to cut entry points, by their names.
        tolerance: with `with_onnx`, the tolerance of the comparison with torch.
        options: how the bundle is written.

    The other attributes are the arguments of `export`.

    Raises:
        OptionError: two of them do not go together.
    """

    model: object
    out: str | os.PathLike[str]
    example: Example = field(default_factory=Example)
    modules: Sequence[str] = ()
    weights: str | os.PathLike[str] | None = None
    graph_from: str | os.PathLike[str] | Bundle | None = None
    dtype: str | torch.dtype | None = None
    generate: int | None = None
    generate_batch: int = DEFAULT_GENERATE_BATCH
    cut: CutOptions = field(default_factory=CutOptions)
    cuts: Mapping[str, CutOptions] = field(default_factory=dict)
    with_onnx: bool = False
    tolerance: Tolerance = field(default_factory=Tolerance)
    strict: bool = False
    allow_ops: Collection[str] = ()
    options: ExportOptions = field(default_factory=ExportOptions)

    def __post_init__(self) -> None:
        makes_inputs = self.example.is_given or self.modules or self.weights is not None
        if self.graph_from is not None:
            cuts = self.cut != CutOptions() or self.cuts
            if makes_inputs or cuts or self.dtype is not None or self.options.assets:
                raise OptionError(
                    "graph_from: the inputs, the dtypes, the cut and the assets are those of the bundle: leave out the other options"
                )
            if not isinstance(self.model, str | os.PathLike):
                raise OptionError(f"graph_from: expected the path of a checkpoint, found {type(self.model).__name__}")
            if form_of_source(os.fspath(self.model)) == "function":
                raise OptionError(
                    f"graph_from: expected a checkpoint, or a Hugging Face folder or name, found the function {self.model}"
                )
            if self.strict or self.options.allow_difference:
                raise OptionError("graph_from: nothing is captured: leave out strict and allow_difference")
        if self.generate is not None and (makes_inputs or self.graph_from is not None):
            raise OptionError(
                "generate: the inputs are made by the export: leave out inputs, entry points, modules, weights and graph_from"
            )
        if self.generate is None and self.generate_batch != DEFAULT_GENERATE_BATCH:
            raise OptionError("generate_batch: it is for a model that generates: state its positions by generate")
        if self.modules and self.example.entry_points is not None:
            raise OptionError("entry_points: each has its own inputs: leave out modules")
        may_be_several = (
            self.example.entry_points is not None or self.modules or isinstance(self.model, str | os.PathLike)
        )
        if self.cuts and not may_be_several and self.generate is None:
            raise OptionError(_NO_ENTRY_POINTS)
        if self.tolerance != Tolerance() and not self.with_onnx:
            raise OptionError("rtol, atol: they are for ONNX files: add these by onnx")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """What an export has written.

    Attributes:
        method: how the model was captured.
        difference: the largest difference between the answers of the bundle and the model to the example; None if the model was not run.
        onnx: the ONNX files of each entry point.
    """

    bundle: Bundle
    method: str
    difference: float | None = None
    onnx: "Sequence[AddedOnnx]" = ()


def export(
    model: torch.nn.Module | ExportedProgram | str | os.PathLike[str] | Callable[[], torch.nn.Module],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    inputs: StatedInputs | None = None,
    out: str | os.PathLike[str],
    entry_points: Mapping[str, Inputs] | None = None,
    modules: Sequence[str] = (),
    weights: str | os.PathLike[str] | None = None,
    graph_from: str | os.PathLike[str] | Bundle | None = None,
    dtype: str | torch.dtype | None = None,
    stages: Stages | Mapping[str, Stages] | None = None,
    split_at: Sequence[str] | Mapping[str, Sequence[str]] = (),
    policy: Policy | None = None,
    plan: Plan | None = None,
    memory: Sequence[int | str] = (),
    speeds: Sequence[float] = (),
    profile: Profile | DeviceProfile | str | os.PathLike[str] | None = None,
    shared: WeightSharing = "replicate",
    dynamic_shapes: Any = None,
    generate: int | None = None,
    generate_batch: int = DEFAULT_GENERATE_BATCH,
    assets: Sequence[str | os.PathLike[str]] = (),
    onnx: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    strict: bool = False,
    allow_ops: Collection[str] = (),
    allow_difference: bool = False,
    overwrite: bool = False,
) -> Bundle:
    """Write a model as a bundle of pipeline stages.

    The model is captured by ``torch.export.export``, cut, and run once on its example. The bundle is loaded from a temporary name, and its
    answer to the example is compared with the answer of the model. The bundle records the answer, so that every loader can check itself. A
    bundle that a loader would refuse is not written. The export does not change the model or the inputs. At most one of `stages`,
    `split_at`, `policy` and `plan` says where to cut. Without them, the model is cut at `stagepack.split_here` in its code, or not cut.

    Args:
        model: a module, an exported program, a ``.pt2`` file, a Hugging Face folder or hub name, or ``"FILE.py:FUNCTION"``; or the folder
            that ``ExportedModel.save_pretrained`` of transformers wrote, of which each program becomes an entry point. The folder of an
            adapter of PEFT is merged into its base model. Of a module that ``torch.compile`` returned, the original module is exported.
            Do not pass a ``.pt2`` file that you do not trust: torch reads a part of it with pickle. With `weights`, a function without
            arguments that makes the module, such as its class.
        args: example inputs by position. An exported program and a Hugging Face model may do without example inputs.
        kwargs: example inputs by name.
        inputs: the example inputs in one argument, in the place of `args`, `kwargs` and `dynamic_shapes`: `Inputs`; or texts, such as
            ``"x=float32[batch=2..512,64]"``, where ``batch`` may change, ``"n=3"`` and ``"x=@x.npy"``; or a dict of inputs and texts by
            name. The guide "Optional and integer inputs" has the grammar.
        out: the folder to write; it must not exist unless `overwrite` is true.
        entry_points: the example inputs of several functions of `model`, by their paths in it: a method (``"encode"``), a module
            (``"text_model"``), or a method of a module (``"vae.decode"``). Each becomes an entry point of the bundle, named by its path
            with ``_`` in the place of each dot, with its own cut. Weights that several of them use are stored once.
        modules: paths of modules of `model`, such as ``["text_model", "unet"]``: each becomes an entry point, as with `entry_points`,
            with the inputs that it gets in its first call when the model runs on `args` and `kwargs`. With `dynamic_shapes`, torch
            decides which sizes of these inputs may change.
        weights: a checkpoint of the module that `model` makes: a ``.safetensors`` file, a file of ``torch.save``, an index of sharded
            files, or a folder of ``torch.distributed.checkpoint``, of which torch reads a part with pickle. Its weights, as the
            weights of a Hugging Face folder, are never in memory together.
        graph_from: a bundle of the same model with other weights: nothing is captured, its graphs and its cut are used, and `model` is
            the new checkpoint, or a Hugging Face folder or hub name.
        dtype: for a Hugging Face folder or hub name: the dtype that its weights are converted to, such as ``"bfloat16"``. By default, the
            weights keep the dtype of the checkpoint.
        stages: the number of stages, of which the slowest is made as fast as possible; or ``"layers"``, a stage for each layer
            of the model, which can be grouped onto any devices. With `entry_points`, of each of them, or a dict from the names of some.
        split_at: paths of modules, such as ``"layers.8"``; each starts a stage. With `entry_points`, a dict from names to such lists.
        policy: a function from `PolicyNode` to a stage number.
        plan: a plan of another bundle (``bundle.entry_point.plan``), or from `stagepack.read_plan`.
        memory: with a number of `stages`: the memory of the device of each stage, in bytes or as ``"24GiB"``.
        speeds: with a number of `stages`: the speed of the device of each stage, relative to the others.
        profile: with `stages`: the device of the stages, such as ``"h100"``, whose memory is the limit of each stage unless `memory` says
            otherwise; or measured times of the model's operators, from `stagepack.read_profile`, or their file.
        shared: how several stages use one weight: each of them stores it (``"replicate"``), or the first one stores it and sends it at
            each call (``"transmit"``).
        dynamic_shapes: the dimensions that may change, as ``torch.export.export`` takes them; parameters may be left out.
        generate: for a language or speech model of transformers (see `stagepack_loaders.decoders`): the number of positions of
            its key-value cache. The cache becomes state of the stages, and the bundle generates. The export makes the example inputs.
        generate_batch: the number of texts that the cache holds, which a server generates at once. On a CPU, memory is taken where texts
            are written; on a GPU, for all of them.
        assets: further files for the bundle, such as ``tokenizer.json`` and ``chat_template.jinja``: `stagepack serve` reads texts with
            them. The files of a Hugging Face folder or hub name are added without this option. `stagepack.add_assets` adds files later.
        onnx: also add ONNX files, as `stagepack.add_onnx` does. A stage that has no ONNX form is named by a warning.
        rtol: with `onnx`: the relative tolerance of the comparison with torch, see `stagepack.add_onnx`.
        atol: with `onnx`: the absolute tolerance of this comparison.
        strict: capture with ``strict=True`` of ``torch.export.export``, which traces the Python code in the place of running it.
        allow_ops: with `graph_from`: as for `stagepack.load`.
        allow_difference: write a model of which the captured program answers otherwise than the model does in eager mode, by more than
            rounding. The bundle answers as the program does, and a warning says so.
        overwrite: replace a bundle that exists at `out`.

    Returns:
        The new bundle, opened.

    Raises:
        CaptureError: the model cannot be loaded, captured or run on its example.
        AnswerDiffersError: the captured program answers otherwise than the model, and `allow_difference` is false.
        UnsupportedError: the captured program contains something that a bundle cannot represent, or that no loader would accept.
        CutError: the model cannot be cut as requested.
        OptionError: `args` is not a tuple, or `kwargs` not a dict, or `model` is not a function though there are `weights`, or another
            option is wrong or does not go with the others.
        OutputExistsError: `out` exists and `overwrite` is false, or it is not a bundle.
        WriteError: the bundle cannot be written.
        MissingPackageError: a Hugging Face model needs transformers, or `onnx` needs ONNX packages, which are not installed.

    Examples:
        Two stages, for batches of 1 to 64:

        >>> batch = torch.export.Dim("batch", min=1, max=64)
        >>> stagepack.export(model, (x,), out="m.stagepack", stages=2, dynamic_shapes={"x": {0: batch}})

        Stages that begin at two layers of a Hugging Face model:

        >>> stagepack.export("./llama", out="llama.stagepack", split_at=["model.layers.8", "model.layers.16"])

        A fine-tuned checkpoint, with the graphs of the bundle of the original one:

        >>> stagepack.export("./llama-tuned", graph_from="llama.stagepack", out="tuned.stagepack")

        Inputs as text, for batches of 2 to 512:

        >>> stagepack.export(model, inputs="x=float32[batch=2..512,64]", out="m.stagepack")

        A module of which the weights are in a file:

        >>> stagepack.export(Net, (x,), weights="net.safetensors", out="net.stagepack")
    """
    check_output_path(out, overwrite=overwrite)
    splits_of_name = split_at if isinstance(split_at, Mapping) else {}
    stages_of_name = stages if isinstance(stages, Mapping) else {}
    cut = CutOptions(
        stages=None if isinstance(stages, Mapping) else stages,
        split_at=() if isinstance(split_at, Mapping) else split_at,
        policy=policy,
        plan=plan,
        memory=memory,
        speeds=speeds,
        profile=profile,
        shared=shared,
    )
    request = ExportRequest(
        model=model,
        out=out,
        example=Example.of_call(args, kwargs, dynamic_shapes, inputs, entry_points),
        modules=modules,
        weights=weights,
        graph_from=graph_from,
        dtype=dtype,
        generate=generate,
        generate_batch=generate_batch,
        cut=cut,
        cuts={
            # Split points in the code of the model hold where neither option does.
            name: replace(
                cut,
                stages=stages_of_name.get(name, None if name in splits_of_name else cut.stages),
                split_at=splits_of_name.get(name, ()),
            )
            for name in {**stages_of_name, **splits_of_name}
        },
        with_onnx=onnx,
        tolerance=Tolerance(rtol, atol),
        strict=strict,
        allow_ops=allow_ops,
        options=ExportOptions(assets=read_assets(assets), overwrite=overwrite, allow_difference=allow_difference),
    )
    result = write_model(request)
    for added in result.onnx:
        prefix = f"{added.bundle.entry_point.name}, " if len(result.bundle.entry_points) > 1 else ""
        for stage_number, reason in added.torch_only.items():
            warn_caller(ExportWarning(f"{prefix}stage {stage_number} runs in torch only: {reason}"))
    return result.bundle


def write_model(request: ExportRequest) -> ExportResult:
    """Write the bundle of a request. See `export` for what is raised."""
    if request.with_onnx:
        # Before a bundle is written, which a package that cannot be imported would leave without ONNX files.
        from stagepack.roads.onnx import add_onnx_to_new_bundle  # noqa: PLC0415 - packages that only this needs
    progress = request.options.progress
    result = _written_capture(request) if request.graph_from is None else _with_other_weights(request)
    if not request.with_onnx:
        return result
    added = tuple(add_onnx_to_new_bundle(result.bundle, request.tolerance, progress))
    return replace(result, bundle=Bundle(result.bundle.path), onnx=added)


def _with_other_weights(request: ExportRequest) -> ExportResult:
    """Write the graphs of a bundle with the weights of a checkpoint; the recorded answer is the answer of the new stages."""
    assert request.graph_from is not None
    assert isinstance(request.model, str | os.PathLike)
    bundle = replace_weights(
        request.graph_from,
        request.model,
        out=request.out,
        allow_ops=request.allow_ops,
        overwrite=request.options.overwrite,
        progress=request.options.progress,
    )
    return ExportResult(bundle=bundle, method=f"the graphs of {request.graph_from}")


def _written_capture(request: ExportRequest) -> ExportResult:
    request.options.progress("capturing the model")
    source = ModelSource.of(request.model, weights=request.weights, dtype=request.dtype)
    folder, assets = source.folder, request.options.assets
    example = request.example
    if request.generate is not None:
        make = export_option("generate")
        made: GeneratingModel = make(source.load()[0], request.generate, request.generate_batch)
        assets = {**made.files, **assets}
        source = ModelSource.of(made.module)
        example = Example(stated=made.inputs, entry_points=made.entry_points or None)
    with strict_captures(request.strict):
        captures = source.captures(example, request.modules)
    differences: list[float] = []
    # The files of a pipeline say more than the files of its folder, such as how texts are cut.
    files = {**model_files(next(iter(captures.values())).model), **assets}
    options = replace(
        request.options,
        assets=exported_assets(folder, files, generates=request.generate is not None),
        compared=differences.append,
    )
    cut_options = _cut_options(request.cut, request.cuts, tuple(captures))
    bundle = export_captures(captures, out=request.out, cut_options=cut_options, options=options)
    method = " and ".join(dict.fromkeys(capture.method for capture in captures.values()))
    return ExportResult(bundle=bundle, method=method, difference=max(differences, default=0.0))


def _cut_options(cut: CutOptions, cuts: Mapping[str, CutOptions], names: Collection[str]) -> dict[str, CutOptions]:
    """Where to cut each entry point."""
    if FORWARD in names and cuts:
        raise OptionError(_NO_ENTRY_POINTS)
    for name in cuts:
        if name not in names:
            raise OptionError(f"stages, split_at: expected names among {', '.join(names)}, found {name!r}")
    if FORWARD not in names and (cut.policy is not None or cut.plan is not None):
        raise OptionError("policy, plan: each entry point is cut by stages or split_at: leave them out")
    return {name: cuts.get(name, cut) for name in names}
