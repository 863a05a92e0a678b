"""A model in any form that users have -> a bundle: the function `stagepack.export`."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from stagepack.bundle_assets import exported_assets, read_assets
from stagepack.capture.entry_points import capture_entry_points, capture_modules, pipeline_module
from stagepack.capture.example_inputs import example_inputs
from stagepack.capture.generation import generating_model
from stagepack.capture.inputs import Inputs
from stagepack.capture.pretrained_model import load_pretrained, model_files
from stagepack.capture.programs import Capture
from stagepack.capture.source import FORWARD, capture_source, capture_with_checkpoint, inputs_of_call
from stagepack.capture.stated_inputs import StatedInputs
from stagepack.errors import ExportWarning, OptionError, warn_caller
from stagepack.exporter import ExportOptions, export_captures
from stagepack.format.manifest import Plan
from stagepack.format.reader import Bundle
from stagepack.format.writer import check_output_path
from stagepack.partition.cut_options import CutOptions, Policy, WeightSharing
from stagepack.partition.profile import DeviceProfile, Profile
from stagepack.torch_internals import uncompiled_module
from stagepack.weight_replacement import replace_weights
from stagepack_loaders.comparison import Tolerance


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
    stages: int | Mapping[str, int] | None = None,
    split_at: Sequence[str] | Mapping[str, Sequence[str]] = (),
    policy: Policy | None = None,
    plan: Plan | None = None,
    memory: Sequence[int | str] = (),
    speeds: Sequence[float] = (),
    profile: Profile | DeviceProfile | str | os.PathLike[str] | None = None,
    shared: WeightSharing = "replicate",
    dynamic_shapes: Any = None,
    generate: int | None = None,
    generate_batch: int = 8,
    assets: Sequence[str | os.PathLike[str]] = (),
    onnx: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    allow_ops: Collection[str] = (),
    allow_difference: bool = False,
    overwrite: bool = False,
) -> Bundle:
    """Write a model as a bundle of pipeline stages.

    The model is captured by ``torch.export.export``, cut, and run once on its example. The bundle is loaded before it has its name, and its
    answer to the example is compared with that of the model, and recorded, so that every loader can check itself against it. What no loader
    accepts is not written. The model and the inputs are unchanged afterwards. At most one of `stages`, `split_at`, `policy` and `plan` says
    where to cut; without them, the model is cut at `stagepack.split_here` in its code, or is one stage.

    Args:
        model: a module, an exported program, a ``.pt2`` file, or a Hugging Face folder or hub name. The folder of an adapter of PEFT is
            merged into its base model. Of a module that ``torch.compile`` returned, the original module is exported. Do not pass a
            ``.pt2`` file that you do not trust: torch reads a part of it with pickle. With `weights`, a function without arguments that
            makes the module, such as its class.
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
            files, or a folder of ``torch.distributed.checkpoint``, of which torch reads a part with pickle. As those of a Hugging Face
            folder, its weights are never in memory together.
        graph_from: a bundle of the same model with other weights: nothing is captured, its graphs and its cut are used, and `model` is
            the new checkpoint, or a Hugging Face folder or hub name.
        dtype: of a Hugging Face folder or hub name: the dtype that its weights are converted to, such as ``"bfloat16"``; by default,
            that of the checkpoint.
        stages: the number of stages; with `entry_points`, of each, or a dict from the names of some to theirs. The cut makes the slowest
            stage as fast as possible.
        split_at: paths of modules, such as ``"layers.8"``; each starts a stage. With `entry_points`, a dict from names to such lists.
        policy: a function from `PolicyNode` to a stage number.
        plan: a plan of another bundle (``bundle.entry_point.plan``), or from `stagepack.read_plan`.
        memory: with `stages`: the memory of the device of each stage, in bytes or as ``"24GiB"``.
        speeds: with `stages`: the speed of the device of each stage, relative to the others.
        profile: with `stages`: the device of the stages, such as ``"h100"``, whose memory is the limit of each stage unless `memory` says
            otherwise; or measured times of the model's operators, from `stagepack.read_profile`, or their file.
        shared: how several stages use one weight: each of them stores it (``"replicate"``), or the first one stores it and sends it at
            each call (``"transmit"``).
        dynamic_shapes: the dimensions that may change, as ``torch.export.export`` takes them; parameters may be left out.
        generate: of a language or speech model of transformers: the number of positions of its key-value cache. The cache becomes state of
            the stages, and the bundle generates; its inputs are then made here. `stagepack_loaders.generation.decoders` says which.
        generate_batch: the number of texts that the cache holds, which a server generates at once. On a CPU, memory is taken where texts
            are written; on a GPU, for all of them.
        assets: further files for the bundle, such as ``tokenizer.json`` and ``chat_template.jinja``: `stagepack serve` reads texts with
            them. Those of a Hugging Face folder or hub name are taken without being named. `stagepack.add_assets` adds some later.
        onnx: also add ONNX files, as `stagepack.add_onnx` does. A stage that has no ONNX form is named by a warning.
        rtol: with `onnx`: the tolerance of the comparison with torch, see `stagepack.add_onnx`.
        atol: likewise.
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
    ways = {"policy": policy, "plan": plan, "memory": memory, "speeds": speeds, "profile": profile}
    inputs = inputs_of_call(args, kwargs, dynamic_shapes, inputs, model)
    asset_contents = read_assets(assets)
    source = model
    if generate is not None:
        if inputs != Inputs() or entry_points or modules or weights is not None or graph_from is not None:
            raise OptionError(
                "generate: the inputs are made by the export: leave out inputs, entry_points, modules and other weights"
            )
        made = generating_model(_loaded_module(model, dtype), generate, generate_batch)
        model, dtype, asset_contents = made.module, None, {**made.files, **asset_contents}
        inputs, entry_points = made.inputs or inputs, made.entry_points or None
    if onnx:
        import stagepack.onnx  # noqa: F401, PLC0415 - packages that it needs are missed before the work begins
    if entry_points is not None or modules:
        if weights is not None or graph_from is not None or any(ways.values()):
            raise OptionError(
                "entry_points, modules: each entry point is cut by stages or split_at: leave out weights, graph_from and the other ways "
                "to cut"
            )
        captures = _captures_of_functions(model, inputs, entry_points, modules, dtype)
        cut_options = _entry_point_cut_options(captures, stages, split_at, shared)
    else:
        if isinstance(stages, Mapping) or isinstance(split_at, Mapping):
            raise OptionError("stages, split_at: a dict is for entry_points, which are missing")
        cut_options = {FORWARD: CutOptions(stages=stages, split_at=split_at, shared=shared, **ways)}  # type: ignore[arg-type]
        if graph_from is not None:
            is_alone = inputs == Inputs() and weights is None and dtype is None and not assets
            if cut_options[FORWARD] != CutOptions() or not is_alone:
                raise OptionError(
                    "graph_from: the inputs, the dtypes, the cut and the assets are those of the bundle: leave out the other options"
                )
            if not isinstance(model, str | os.PathLike):
                raise OptionError(f"graph_from: expected the path of a checkpoint, found {type(model).__name__}")
            bundle = replace_weights(graph_from, model, out=out, allow_ops=allow_ops, overwrite=overwrite)
            return _with_onnx(bundle, Tolerance(rtol, atol)) if onnx else bundle
        captures = {FORWARD: _captured_model(model, inputs, weights, dtype)}
    own_files = model_files(next(iter(captures.values())).model)
    options = ExportOptions(
        assets=exported_assets(source, own_files | asset_contents, generates=generate is not None),
        overwrite=overwrite,
        allow_difference=allow_difference,
    )
    bundle = export_captures(captures, out=out, cut_options=cut_options, options=options)
    return _with_onnx(bundle, Tolerance(rtol, atol)) if onnx else bundle


def _captures_of_functions(
    model: object,
    inputs: Inputs,
    entry_points: Mapping[str, Inputs] | None,
    modules: Sequence[str],
    dtype: str | torch.dtype | None,
) -> dict[str, Capture]:
    """The captured functions or modules of a model that become entry points."""
    if entry_points is None:
        module = _loaded_module(model, dtype)
        if inputs == Inputs() and isinstance(model, str | os.PathLike):
            inputs = example_inputs(module, os.fspath(model))
        return capture_modules(module, inputs, modules)
    if inputs != Inputs() or modules:
        raise OptionError("entry_points: each has its own inputs: leave out args, kwargs, dynamic_shapes and modules")
    return capture_entry_points(_loaded_module(model, dtype), entry_points)


def _loaded_module(model: object, dtype: str | torch.dtype | None) -> torch.nn.Module:
    """The module whose functions become entry points."""
    if isinstance(model, str | os.PathLike):
        loaded: torch.nn.Module = load_pretrained(os.fspath(model), dtype=dtype)
        return loaded
    if dtype is not None:
        raise OptionError("dtype: it is for a Hugging Face folder or hub name: convert a module yourself")
    module = pipeline_module(model) or model
    if not isinstance(module, torch.nn.Module):
        raise OptionError(
            f"entry_points: expected a torch.nn.Module, a pipeline of diffusers, or a Hugging Face folder or hub name, found "
            f"{type(model).__name__}"
        )
    return uncompiled_module(module)


def _entry_point_cut_options(
    names: Collection[str],
    stages: int | Mapping[str, int] | None,
    split_at: Sequence[str] | Mapping[str, Sequence[str]],
    shared: WeightSharing,
) -> dict[str, CutOptions]:
    """Where to cut each entry point."""
    if split_at and not isinstance(split_at, Mapping):
        raise OptionError("split_at: with entry_points, expected a dict from their names to lists of modules")
    stages_of_name = stages if isinstance(stages, Mapping) else {}
    splits_of_name = split_at if isinstance(split_at, Mapping) else {}
    for option, options_of_name in (("stages", stages_of_name), ("split_at", splits_of_name)):
        for name in options_of_name:
            if name not in names:
                raise OptionError(f"{option}: expected names among {', '.join(names)}, found {name!r}")
    # Split points in the code of the model hold where neither option does.
    stage_count = None if isinstance(stages, Mapping) else stages
    return {
        name: CutOptions(
            stages=stages_of_name.get(name, None if name in splits_of_name else stage_count),
            split_at=splits_of_name.get(name, ()),
            shared=shared,
        )
        for name in names
    }


def _with_onnx(bundle: Bundle, tolerance: Tolerance) -> Bundle:
    """Add ONNX files; warn of stages that have none."""
    from stagepack.onnx import add_onnx_to_new_bundle  # noqa: PLC0415 - packages that only this needs

    for added in add_onnx_to_new_bundle(bundle, tolerance):
        prefix = f"{added.bundle.entry_point.name}, " if len(bundle.entry_points) > 1 else ""
        for stage_number, reason in added.torch_only.items():
            warn_caller(ExportWarning(f"{prefix}stage {stage_number} runs in torch only: {reason}"))
    return Bundle(bundle.path)


def _captured_model(
    model: object, inputs: Inputs, weights: str | os.PathLike[str] | None, dtype: str | torch.dtype | None
) -> Capture:
    if weights is None:
        return capture_source(model, inputs, dtype=dtype)  # type: ignore[arg-type]
    if dtype is not None:
        raise OptionError(
            "dtype: it is for a Hugging Face folder or hub name: let the function make a module of this dtype"
        )
    if isinstance(model, torch.nn.Module) or not callable(model):
        raise OptionError(
            f"weights: expected a function that makes the module, such as its class, found {type(model).__name__}"
        )
    return capture_with_checkpoint(lambda: (model(), None), inputs, weights)
