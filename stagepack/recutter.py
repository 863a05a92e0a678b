"""A bundle -> the same model in other stages. Needs no torch, nor the model.

The stages are joined to the graph of the whole model, which is cut again: the new bundle has the bytes that an export with the
new cut would have.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagepack.bundle_writing import INDEX_FILE_NAME, ModelOrigin, write_bundle
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.graph import Graph, Weight
from stagepack.format.plan import Plan
from stagepack.format.reader import EXAMPLE_FILE_NAME, Bundle
from stagepack.format.validate import check_graph, raise_problems
from stagepack.format.weights import StoredTensor, TensorSpec, read_weight_header
from stagepack.format.writer import TensorSource, check_output_path
from stagepack.graph.joining import join_stages
from stagepack.partition.costs import graph_costs
from stagepack.partition.cut import Cut, WeightSharing
from stagepack.partition.cut_options import CutOptions
from stagepack.partition.policies import Policy

_PIECE = 8 * 2**20  # bytes that are copied at a time


def recut(
    bundle: str | os.PathLike[str] | Bundle,
    *,
    out: str | os.PathLike[str],
    stages: int | None = None,
    split_at: Sequence[str] = (),
    policy: Policy | None = None,
    plan: Plan | None = None,
    memory: Sequence[int | str] = (),
    speeds: Sequence[float] = (),
    shared: WeightSharing = "replicate",
    overwrite: bool = False,
) -> Bundle:
    """Write the model of a bundle in other stages; the result has the same bytes as an export with this cut.

    ONNX files are of the old stages, and are left out: `stagepack.add_onnx` makes new ones.

    Args:
        bundle: its folder, or what `stagepack.open` gave.
        out: the folder to write; it may be the bundle itself when `overwrite` is true.
        stages: cut into this many stages; this and the further ones are those of `stagepack.export`. None of them: one stage.
        split_at: names of modules; each starts a stage.
        policy: a function from `PolicyNode` to a stage number.
        plan: a plan: of another bundle, or read by `stagepack.read_plan`.
        memory: with `stages`: what the device of each stage has, in bytes or as ``"24GiB"``.
        speeds: with `stages`: how fast the device of each stage is, relative to the others.
        shared: "replicate" or "transmit".
        overwrite: replace a bundle that is there.

    Returns:
        The new bundle, opened.

    Raises:
        NotABundleError, VersionError: there is no bundle that this stagepack reads.
        DigestError, FormatError: a file is damaged, or breaks a rule of the format.
        CutError: the model cannot be cut as asked.
        OutputExistsError: `out` exists.
        WriteError: the disk is full or the like.
    """
    cut_options = CutOptions(
        stages=stages, split_at=split_at, policy=policy, plan=plan, memory=memory, speeds=speeds, shared=shared
    )
    return recut_with_options(
        bundle if isinstance(bundle, Bundle) else Bundle(bundle), out=out, cut_options=cut_options, overwrite=overwrite
    )


def recut_with_options(
    opened: Bundle, *, out: str | os.PathLike[str], cut_options: CutOptions, overwrite: bool = False
) -> Bundle:
    """Write the model of a bundle in other stages; see `recut`."""
    check_output_path(out, overwrite=overwrite)
    opened.check_digests(opened.files)
    whole = _join(opened)
    cut, made = _cut(whole, cut_options)
    manifest = opened.manifest
    own = {name for stage in manifest.stages for name in (stage.graph, *stage.weights, *stage.onnx_files)} | {
        EXAMPLE_FILE_NAME,
        INDEX_FILE_NAME,
    }
    origin = ModelOrigin(
        signature=manifest.signature,
        symbols=manifest.symbols,
        producer=manifest.producer,
        plan=made,
        device=manifest.device,
        seed=manifest.seed,
        files={name: opened.read(name) for name in opened.files if name not in own},
    )
    write_bundle(out, cut, whole.weights, _example(opened), origin, overwrite=overwrite)
    return Bundle(out)


def plan_bundle(bundle: Bundle, cut_options: CutOptions) -> tuple[Cut, Plan]:
    """The cut that `recut` would write, and what it costs. Reads no weights.

    Raises:
        DigestError, FormatError: a file is damaged, or breaks a rule of the format.
        CutError: the model cannot be cut as asked.
    """
    return _cut(_join(bundle), cut_options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    graph: Graph
    weights: TensorSource


def _join(bundle: Bundle) -> _Whole:
    graphs = [bundle.graph(stage) for stage in range(len(bundle.stages))]
    graph = join_stages(bundle.manifest, graphs)
    raise_problems(check_graph(graph, f"{bundle.path.name}, joined"))
    places: dict[str, tuple[Path, StoredTensor]] = {}
    for number, stage in enumerate(graphs):
        places.update(bundle.tensors(number, stage))
    return _Whole(graph=graph, weights=_tensors(places, graph.weights))


def _cut(whole: _Whole, cut_options: CutOptions) -> tuple[Cut, Plan]:
    costs = graph_costs(whole.graph, {name: spec.nbytes for name, spec in whole.weights.specs.items()})
    return cut_options.cut(whole.graph, costs)


def _example(bundle: Bundle) -> TensorSource:
    path = bundle.example
    return _tensors({} if path is None else {name: (path, tensor) for name, tensor in read_weight_header(path).items()})


def _tensors(places: dict[str, tuple[Path, StoredTensor]], weights: Sequence[Weight] = ()) -> TensorSource:
    """Tensors that lie in files, and weights of zeros that lie in none."""
    specs = {name: TensorSpec(name=name, dtype=TORCH_DTYPES[t.dtype], shape=t.shape) for name, (_, t) in places.items()}
    specs |= {w.stored: TensorSpec(name=w.stored, dtype=w.dtype, shape=w.shape) for w in weights if w.zeros}
    return TensorSource(specs=specs, read=lambda name: _pieces(*places[name]))


def _pieces(path: Path, tensor: StoredTensor) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(tensor.start)
        for position in range(tensor.start, tensor.end, _PIECE):
            yield file.read(min(_PIECE, tensor.end - position))
