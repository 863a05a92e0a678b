"""The versions of a pipeline: stages with the weights of one bundle. Each call, and each sequence of calls, runs on one of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from stagepack.adapter.adapted_bundle import AdaptedBundle
from stagepack.deltas.document import WEIGHT_VERSION_CHARACTERS
from stagepack.errors import OptionError, UpdateError
from stagepack.format.manifest import EntryPoint, Stage
from stagepack.format.reader import Bundle
from stagepack.partition.joined_bundle import join_bundle
from stagepack_loaders.adapter_calls import AdapterCalls
from stagepack_loaders.base import LoadedStage, Runtime
from stagepack_loaders.stages import StageDriver


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class StageVersion:
    """One version of a pipeline. What runs on it refers to it; its weights are freed with the last reference.

    Attributes:
        name: its name: what the trainer calls it, or the digest of its bundle.
        bundle: its bundle, in the stages that run.
        stages: those of its stages that are in this process, by number, in order.
        number: its number in the processes of the stages.
        group: the number of the start of these processes. A version of an earlier start is unknown to them.
        adapters: what its calls say about adapters.
    """

    name: str
    bundle: Bundle
    stages: Mapping[int, StageDriver] = field(default_factory=dict)
    number: int = 0
    group: int = 0
    adapters: AdapterCalls = field(init=False)

    def __post_init__(self) -> None:
        """Find the adapters."""
        self.adapters = AdapterCalls(self.bundle)

    @property
    def identity(self) -> tuple[object, ...]:
        """See `version_identity`."""
        return version_identity(self.bundle, self.name)

    def stages_of_runtimes(self) -> dict[Runtime, dict[int, LoadedStage]]:
        """Return the loaded stages by runtime and number."""
        stages: dict[Runtime, dict[int, LoadedStage]] = {}
        for number, driver in self.stages.items():
            stages.setdefault(driver.runtime, {})[number] = driver.loaded
        return stages


@dataclass(slots=True, eq=False, kw_only=True)
class CallSequence:
    """A sequence of calls, all on one version.

    Attributes:
        version: the version.
        states: its state by stage number, if the stages are in this process.
        number: its number in the processes of the stages.
    """

    version: StageVersion
    states: dict[int, Any] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSource:
    """Where a new version comes from.

    Attributes:
        bundle: its bundle, at the entry point that runs.
        name: its name; None for that of its bundle.
        base: the digest of the bundle that must run, of which deltas make the new one; None for any.
        keeps_previous: keep the version before in memory, until the next update.
    """

    bundle: Bundle
    name: str | None = None
    base: str | None = None
    keeps_previous: bool = False


def version_name(bundle: Bundle) -> str:
    """Return the name of the version of a bundle: that of the last delta that makes it, or else its digest."""
    return (bundle.patches.version if bundle.patches is not None else "") or bundle.digest


def version_identity(bundle: Bundle, name: str) -> tuple[object, ...]:
    """Return what tells a version from others by its weights, its name and its adapters: names of versions and bundles may repeat."""
    return bundle.digest, name, bundle.adapter_digests if isinstance(bundle, AdaptedBundle) else ()


def check_weight_version(name: str | None) -> None:
    """Check the name that a caller gives a version."""
    if name is not None and (
        not isinstance(name, str) or not 0 < len(name) <= WEIGHT_VERSION_CHARACTERS or not name.isprintable()
    ):
        raise OptionError(
            f"version: expected a printable text of 1 to {WEIGHT_VERSION_CHARACTERS} characters, found {name!r:.300}"
        )


def same_model(running: Bundle, source: UpdateSource) -> Bundle:
    """Return a bundle in the stages that run; refuse one with other graphs, or that takes and returns other values."""
    bundle = source.bundle
    if isinstance(running, AdaptedBundle) and running.adapters:
        raise UpdateError(
            f"{running.location}: expected a pipeline without adapters, found {', '.join(running.adapters)}: they were made for the "
            "weights that run: unload them, and load those that were made for the new ones (stagepack adapter)"
        )
    if source.base not in (None, running.digest):
        raise UpdateError(
            f"{bundle.location}: expected a delta on the bundle that runs, {running.digest}, found one on {source.base}: give the deltas "
            "between them, in order, or the whole bundle"
        )
    name = running.entry_point.name
    if name not in {entry_point.name for entry_point in bundle.entry_points}:
        raise _other_model(running, bundle, f"it has no entry point {name!r}")
    stored, new = running.stored, bundle.select(name)
    if difference := _difference(stored, new):
        raise _other_model(running, bundle, difference)
    joined = join_bundle(new, [len(running.stored_stages(number)) for number in range(len(running.stages))])
    return AdaptedBundle(joined, {}) if isinstance(running, AdaptedBundle) else joined


def _difference(running: Bundle, new: Bundle) -> str:
    """What keeps the stages of a bundle from taking the weights of another one; empty if nothing does."""
    if len(running.stages) != len(new.stages):
        return f"expected {len(running.stages)} stages, found {len(new.stages)}"
    if _contract(running.entry_point) != _contract(new.entry_point):
        return "its inputs, results or edges are others"
    for number, (stage, new_stage) in enumerate(zip(running.stages, new.stages, strict=True)):
        if running.files[stage.graph].blake3 != new.files[new_stage.graph].blake3:
            return f"the graph of stage {number} is another one"
        if _facts(stage) != _facts(new_stage):
            return f"the manifest entry of stage {number} is another one"
    return ""


def _contract(entry_point: EntryPoint) -> EntryPoint:
    """What callers and stages see of an entry point."""
    return structs.replace(entry_point, stages=(), plan=None, example=None, seed=0)


def _facts(stage: Stage) -> Stage:
    """What a stage is, without the files that hold it."""
    return structs.replace(stage, graph="", weights=(), onnx=None, flops=0)


def _other_model(running: Bundle, bundle: Bundle, reason: str) -> UpdateError:
    return UpdateError(
        f"{bundle.location}: expected a bundle with the graphs of {running.location}, whose weights alone are others: {reason}: load it "
        "as a pipeline of its own"
    )
