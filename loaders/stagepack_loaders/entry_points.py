"""Load the entry points of a bundle together, so that they share weights and state."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy as copy_of
from typing import TYPE_CHECKING, Any

from msgspec import structs

from stagepack.errors import EntryPointError, InputError, OptionError, named_errors
from stagepack.format.reader import Bundle
from stagepack.format.rules import format_names
from stagepack.named_adapters import pinned_adapters
from stagepack.opening import BundleSource, DeltaSource, TrustedSigners, errors_name_bundle
from stagepack_loaders.base import SharedObjects
from stagepack_loaders.call_limits import Limits, checked_limits
from stagepack_loaders.decoders import ENCODER_NAME, generating_entry_point
from stagepack_loaders.joint_versions import join_versions
from stagepack_loaders.local_pipeline import Pipeline, load_pipeline
from stagepack_loaders.options import (
    DEFAULT_RUNTIME,
    AdapterSources,
    Compile,
    LoadOptions,
    PlacementOptions,
    Verify,
    adapter_list,
    device_list,
)
from stagepack_loaders.pipeline_versions import PipelineVersions
from stagepack_loaders.placement import check_joint_memory
from stagepack_loaders.preparation import open_for_loading

if TYPE_CHECKING:
    import torch

    Devices = str | torch.device | Sequence[str | torch.device]


class EntryPointPipelines(PipelineVersions, Mapping[str, Pipeline]):
    """The entry points of a bundle as pipelines, by name: ``pipelines.encode(x)`` or ``pipelines["encode"](x)``.

    All of them have the weights and adapters of one version: a change of one, or of all, is one of all, between the same two calls. What
    they share is read once.
    """

    def __init__(self, pipelines: Mapping[str, Pipeline]) -> None:
        self._pipelines = dict(pipelines)
        self.executor = next(iter(self._pipelines.values())).executor

    @property
    def bundle(self) -> Bundle:
        """The bundle of the newest version."""
        bundle = copy_of(self.executor.bundle.stored)
        bundle.selected = bundle.entry_points[0] if len(bundle.entry_points) == 1 else None
        return bundle

    def __repr__(self) -> str:
        """The bundle, and the names of the entry points."""
        return f"<EntryPointPipelines {self.bundle.location!r}: {', '.join(self._pipelines)}>"

    def __getitem__(self, name: str) -> Pipeline:
        """The pipeline of an entry point."""
        return self._pipelines[name]

    def __getattr__(self, name: str) -> Pipeline:
        """The pipeline of an entry point."""
        pipelines = self.__dict__.get("_pipelines", {})
        if name not in pipelines:
            expected = format_names(list(pipelines))
            raise AttributeError(f"expected one of the entry points {expected}, found {name!r}", name=name, obj=self)
        found: Pipeline = pipelines[name]
        return found

    def generate(self, inputs: Any = None, attention_mask: Any = None, **settings: Any) -> Any:
        """Generate tokens with the decoder of the bundle, and with its encoder if it has one.

        Args:
            inputs: see `CallablePipeline.generate`.
            attention_mask: see `CallablePipeline.generate`.
            **settings: see `CallablePipeline.generate`.

        Returns:
            All tokens of the decoder, [batch, length].

        Raises:
            InputError: no entry point is a decoder with the inputs of generation; or see `CallablePipeline.generate`.

        Examples:
            >>> translator = stagepack.load_entry_points("t5.stagepack")
            >>> tokens = translator.generate(input_ids, max_new_tokens=50)
        """
        decoder_name = generating_entry_point(self.bundle)
        if decoder_name is None:
            raise InputError(f"{self.bundle.location}: no entry point is a decoder with the inputs of generation")
        decoder = self[decoder_name]
        encoder = self[ENCODER_NAME] if "encoder_hidden_states" in {edge.name for edge in decoder.inputs} else None
        return decoder.generate(inputs, attention_mask, encoder=encoder, **settings)

    def __iter__(self) -> Iterator[str]:
        """The names of the entry points."""
        return iter(self._pipelines)

    def __len__(self) -> int:
        """How many entry points there are."""
        return len(self._pipelines)

    def __dir__(self) -> list[str]:
        """The names of the entry points, too."""
        return [*super().__dir__(), *self._pipelines]


@errors_name_bundle
def load_entry_points(
    bundle: BundleSource,
    devices: "Devices | Mapping[str, Devices] | None" = None,
    *,
    device: "str | torch.device | None" = None,
    runtime: str = DEFAULT_RUNTIME,
    types: Collection[type] = (),
    allow_ops: Collection[str] = (),
    verify: Verify = "full",
    require_signature: TrustedSigners | None = None,
    deltas: Sequence[DeltaSource] = (),
    copy: bool = False,
    compile: Compile = False,
    stream: bool = False,
    adapters: AdapterSources = None,
    limits: Limits | None = None,
    memory: Sequence[int | str] = (),
    speeds: Sequence[float] = (),
    profiles: Sequence[str] = (),
    links: Sequence[str] = (),
    stages_per_device: Sequence[int] = (),
) -> EntryPointPipelines:
    """Load all entry points of a bundle into this process.

    Weights that several entry points use are in memory once for each device. What a call of one entry point writes, such as a cache in
    buffers of the model, calls of the others see, if the stages that use it are on one device.

    Args:
        bundle: the folder of the bundle, its URL (see `stagepack.open`), or an opened bundle.
        devices: the device of each stage of an entry point; see `stagepack.load`. A dict has them for each
            entry point by name; those that it leaves out are on the CPU.
        device: the device of all stages, in the place of `devices`.
        runtime: the name of the runtime that executes the stages.
        types: see `stagepack.load`.
        allow_ops: see `stagepack.load`.
        verify: see `stagepack.load`.
        require_signature: see `stagepack.load`.
        deltas: see `stagepack.load`.
        copy: see `stagepack.load`.
        compile: see `stagepack.load`.
        stream: see `stagepack.load`.
        adapters: see `stagepack.load`. Each entry point runs the part of an adapter that changes its weights: give calls that belong
            together the same one.
        limits: see `stagepack.load`; without `stall_seconds`.
        memory: see `stagepack.load`. All entry points together fit into it, where weights that several of them use count once.
        speeds: see `stagepack.load`.
        profiles: see `stagepack.load`.
        links: see `stagepack.load`.
        stages_per_device: see `stagepack.load`; for each entry point.

    Returns:
        The pipelines by the name of the entry point, also as attributes.

    Raises:
        EntryPointError: `devices` names an entry point that the bundle does not have.
        StagepackError: see `stagepack.load`.

    Examples:
        >>> translator = stagepack.load_entry_points("translator.stagepack", devices={"decode": ["cuda:0", "cuda:1"]})
        >>> hidden = translator.encode(input_ids)
        >>> logits = translator.decode(decoder_ids, hidden)
    """
    limits = checked_limits(limits)
    if limits.stall_seconds is not None:
        raise OptionError(
            "stall_seconds: only stages in processes of their own have it: load one entry point with processes=True"
        )
    opened_bundle = open_for_loading(bundle, verify, require_signature, deltas)
    names = [entry_point.name for entry_point in opened_bundle.entry_points]
    devices_of_name = devices if isinstance(devices, Mapping) else dict.fromkeys(names, devices)
    if unknown := devices_of_name.keys() - set(names):
        expected = format_names(names)
        raise EntryPointError(f"devices: expected names among {expected}, found {format_names(sorted(unknown))}")
    options = LoadOptions(
        runtime=runtime,
        allow_ops=allow_ops,
        verify=verify,
        copy=copy,
        compile=compile,
        stream=stream,
        adapters=pinned_adapters(opened_bundle, adapter_list(adapters), require_signature),
        placement=PlacementOptions(
            memory=memory, speeds=speeds, profiles=profiles, links=links, stages_per_device=stages_per_device
        ),
    )
    options_of_name = {
        name: structs.replace(options, devices=device_list(devices_of_name.get(name), device)) for name in names
    }
    pipelines = load_each_entry_point(opened_bundle, options_of_name, types, limits)
    for pipeline in (pipelines, *pipelines.values()):
        pipeline.trusted_signers = require_signature
    return pipelines


def load_each_entry_point(
    bundle: Bundle, options: Mapping[str, LoadOptions], types: Collection[type], limits: Limits
) -> EntryPointPipelines:
    """Load entry points together, each with its options, by name."""
    check_joint_memory(bundle, options)
    shared, pipelines = SharedObjects(), {}
    for name, options_of_name in options.items():
        selected = bundle.select(name)
        with named_errors(selected.location):
            pipelines[name] = load_pipeline(selected, options_of_name, types, limits, shared)
    join_versions([pipeline.executor.updated for pipeline in pipelines.values()])
    return EntryPointPipelines(pipelines)
