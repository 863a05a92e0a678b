"""Cut the model of a bundle into other stages, without torch and without the model.

The stages are joined to the graph of the whole model, which is cut again. The new bundle has the same bytes as an export with the new cut
would have.
"""

import dataclasses
import os
from collections.abc import Sequence

import msgspec

from stagepack.format.graph import Graph
from stagepack.format.plan import Plan
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems
from stagepack.format.validate.graph_rules import check_graph
from stagepack.graph.model_assembly import join_stages
from stagepack.opening import BundleSource, errors_name_bundle, opened
from stagepack.partition.costs import graph_costs
from stagepack.partition.cut_options import CutOptions, Policy, Stages, WeightSharing
from stagepack.partition.partitioner import Partition, partition_graph
from stagepack.partition.profile import DeviceProfile, Profile
from stagepack.roads.stored_bundle import StoredEntryPoint, begin_rewriting, read_entry_point, read_entry_points


@errors_name_bundle
def recut(
    bundle: BundleSource,
    *,
    out: str | os.PathLike[str],
    stages: Stages | None = None,
    split_at: Sequence[str] = (),
    policy: Policy | None = None,
    plan: Plan | None = None,
    memory: Sequence[int | str] = (),
    speeds: Sequence[float] = (),
    profile: Profile | DeviceProfile | str | os.PathLike[str] | None = None,
    shared: WeightSharing = "replicate",
    overwrite: bool = False,
) -> Bundle:
    """Write the model of a bundle in other stages.

    The new bundle has the same bytes as an export of the model with this cut. Needs no torch. Of a bundle with several entry points, the
    selected one is cut (``bundle.select(name)``); the others stay as they are. ONNX files belong to the old stages and
    are left out; `stagepack.add_onnx` makes new ones. At most one of `stages`, `split_at`, `policy` and `plan` says where to cut;
    without them, the new bundle has one stage.

    Args:
        bundle: the folder of the bundle, its URL, or an opened bundle.
        out: the folder to write; it must not exist unless `overwrite` is true, and may then be the bundle itself.
        stages: the number of stages, of which the slowest is made as fast as possible; or ``"layers"``, a stage for each layer
            of the model, which can be grouped onto any devices.
        split_at: paths of modules, such as ``"layers.8"``; each starts a stage.
        policy: a function from `PolicyNode` to a stage number.
        plan: a plan of another bundle (``bundle.entry_point.plan``), or from `stagepack.read_plan`.
        memory: with a number of `stages`: the memory of the device of each stage, in bytes or as ``"24GiB"``.
        speeds: with a number of `stages`: the speed of the device of each stage, relative to the others.
        profile: with `stages`: the device of the stages, such as ``"h100"``, whose memory is the limit of each stage unless `memory` says
            otherwise; or measured times of the model's operators, from `stagepack.read_profile`, or their file.
        shared: how several stages use one weight: each of them stores it (``"replicate"``), or the first one stores it and sends it at
            each call (``"transmit"``).
        overwrite: replace a bundle that exists at `out`.

    Returns:
        The new bundle, opened.

    Raises:
        NotABundleError, VersionError: there is no bundle that this version of stagepack reads.
        DigestError, FormatError: a file is damaged, or breaks a rule of the format; or `out` is the bundle itself, and has files that the
            manifest does not list, which would be lost.
        CutError: the model cannot be cut as requested.
        OutputExistsError: `out` exists and `overwrite` is false, or it is not a bundle.
        WriteError: the bundle cannot be written, or the old one was changed meanwhile.

    Examples:
        >>> stagepack.recut("m.stagepack", out="m8.stagepack", stages=8)
        >>> stagepack.recut("m.stagepack", out="m.stagepack", split_at=["layers.8"], overwrite=True)
    """
    cut_options = CutOptions(
        stages=stages,
        split_at=split_at,
        policy=policy,
        plan=plan,
        memory=memory,
        speeds=speeds,
        profile=profile,
        shared=shared,
    )
    return recut_with_options(opened(bundle), out=out, cut_options=cut_options, overwrite=overwrite)


def recut_with_options(
    bundle: Bundle, *, out: str | os.PathLike[str], cut_options: CutOptions, overwrite: bool = False
) -> Bundle:
    """Write the model of a bundle in other stages.

    out: the folder to write; it must not exist unless `overwrite` is true, and may then be the bundle itself.
    """
    selected_name = bundle.entry_point.name
    builder, versions = begin_rewriting(bundle, out, overwrite=overwrite)
    for stored in read_entry_points(bundle, versions):
        content = stored.content
        if content.entry_point.name == selected_name:
            partition = _cut(stored, cut_options)
            edges, plan = partition.cut.edges, partition.plan
            entry_point = msgspec.structs.replace(content.entry_point, edges=edges, plan=plan)
            content = dataclasses.replace(content, entry_point=entry_point, stages=partition.cut.stages)
        builder.add(content, stored.weights)
    return builder.write()


def plan_bundle(bundle: Bundle, cut_options: CutOptions) -> Partition:
    """Make the cut that `recut` would write. Reads no weights."""
    return _cut(read_entry_point(bundle), cut_options)


def whole_graph(bundle: Bundle) -> Graph:
    """Return the graph of the whole model, as it was before the cut. Reads no weights."""
    return _join_graphs(bundle.stored, bundle.stored.graphs())


def _join_graphs(bundle: Bundle, stage_graphs: Sequence[Graph]) -> Graph:
    graph = join_stages(bundle.entry_point, stage_graphs)
    raise_problems(check_graph(graph, f"{bundle.path.name}, joined"))
    return graph


def _cut(entry_point: StoredEntryPoint, cut_options: CutOptions) -> Partition:
    graph = _join_graphs(entry_point.bundle, entry_point.graphs)
    weight_bytes = {tensor: spec.nbytes for tensor, spec in entry_point.weights.specs.items()}
    return partition_graph(graph, graph_costs(graph, weight_bytes), cut_options)
