"""The weights of a version that is loaded beside the one that runs: those that are the same are in memory once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from msgspec import structs

from stagepack.errors import UpdateError
from stagepack.format.graph import Weight
from stagepack.format.reader import Bundle
from stagepack.format.validate.files import NamedWeights
from stagepack_loaders.base import Loading
from stagepack_loaders.torch.devices import typed_memory_errors
from stagepack_loaders.torch.stage import TorchStage
from stagepack_loaders.torch.weight_gate import GatedModule
from stagepack_loaders.torch.weight_store import LoadedWeights, StageWeights, WeightCache
from stagepack_loaders.update_report import UpdateReport
from stagepack_loaders.weight_changes import WeightChanges


def check_update(stages: Mapping[int, TorchStage]) -> None:
    """Check that stages can be replaced by the same ones with other weights; see `Runtime.check_update`."""
    for stage_number, stage in stages.items():
        if reason := stage.reason_to_keep():
            raise UpdateError(f"stage {stage_number} cannot take other weights: {reason}")


class StagedStore:
    """A `WeightStore` of the weights of a new version: those that are the same as in the stages that run are the tensors of these."""

    def __init__(
        self, running: Mapping[int, TorchStage], stages: Mapping[int, StageWeights], changes: WeightChanges
    ) -> None:
        self._running = {number: stage.weights_by_value() for number, stage in running.items()}
        self._changes = changes
        # Buffers that calls write have new memory, and so has all that shares it.
        self._state_tensors = {
            weight.stored for stage in stages.values() for weight in stage.graph.weights if stage.is_state(weight)
        }
        self._cache = WeightCache()

    def has_gate(self, stage: StageWeights) -> bool:
        """See `WeightStore`."""
        return False

    def open(self, stages: Sequence[StageWeights], *, verify: bool) -> None:
        """See `WeightStore`. Files of which no tensor is needed are not read."""
        names = [self._needed_files(stage) for stage in stages]
        file_names = dict.fromkeys(file_name for own_names in names for file_name in own_names)
        self._cache.open_files(stages[0].bundle, file_names, stages[0].loading, verify=verify)

    def load(self, stage: StageWeights, *, verify: bool) -> LoadedWeights:
        """See `WeightStore`."""
        running = self._running[stage.stage_number]
        return LoadedWeights(
            {
                weight.value: self._cache.read_of(stage, weight, stage.device)
                if self._is_new(stage, weight)
                else running[weight.value]
                for weight in stage.graph.weights
            }
        )

    def _is_new(self, stage: StageWeights, weight: Weight) -> bool:
        if weight.zeros:
            return stage.is_state(weight)
        path, stored = stage.stored_tensors[weight.stored]
        return weight.stored in self._state_tensors or self._changes.is_changed(path.name, stored.name)

    def _needed_files(self, stage: StageWeights) -> list[str]:
        """The names of the files that have tensors which are not in memory."""
        return [
            stage.stored_tensors[weight.stored][0].name
            for weight in stage.graph.weights
            if not weight.zeros and self._is_new(stage, weight)
        ]


@typed_memory_errors()
def stage_version(
    bundle: Bundle,
    running: Mapping[int, TorchStage],
    changes: WeightChanges,
    loading: Loading,
    report: UpdateReport,
) -> dict[int, TorchStage]:
    """Load stages that run the code of other ones with the weights of a bundle; see `Runtime.stage_version`."""
    verify = loading.options.verifies_weights
    # All weights are there before a call runs with them.
    loading = replace(loading, options=structs.replace(loading.options, stream=False))
    with report.part("fetch"):
        bundle.fetch(file_name for number in running for file_name in bundle.stages[number].weights)
    with report.part("stage"):
        for stage in running.values():
            stage.wait_for_weights()
        named_weights = NamedWeights()
        weights = {
            number: StageWeights(
                bundle=bundle,
                stage_number=number,
                graph=stage.graph,
                stored_tensors=bundle.tensors(number, stage.graph, None, named_weights),
                device=stage.device,
                loading=loading,
            )
            for number, stage in running.items()
        }
        stores = {
            device: StagedStore(running, _on_device(weights, device), changes)
            for device in {stage.device for stage in running.values()}
        }
    with report.part("verify"):
        for device, store in stores.items():
            store.open(list(_on_device(weights, device).values()), verify=verify)
    with report.part("stage"):
        return {
            number: _new_stage(stage, stores[stage.device].load(weights[number], verify=verify), bundle)
            for number, stage in running.items()
        }


def _on_device(weights: Mapping[int, StageWeights], device: torch.device) -> dict[int, StageWeights]:
    return {number: stage for number, stage in weights.items() if stage.device == device}


def _new_stage(running: TorchStage, loaded: LoadedWeights, bundle: Bundle) -> TorchStage:
    """Return a stage that runs the code of another one, which asks for its weights no more."""
    code = running.code
    if isinstance(code.compiled_module, GatedModule):
        code = replace(code, compiled_module=None)
    return TorchStage(code, loaded.tensors, running.device, bundle.stages[code.stage_number].state)
