"""The weights of a version that is loaded beside the one that runs: those that are the same are in memory once."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from msgspec import structs

from stagepack.errors import UpdateError
from stagepack.format.graph import Weight
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems
from stagepack.format.validate.files import NamedWeights
from stagepack.format.weights import StoredTensor
from stagepack_loaders.adapter_calls import AdapterCalls
from stagepack_loaders.base import Loading, SharedObjects
from stagepack_loaders.torch.devices import typed_memory_errors
from stagepack_loaders.torch.patched_file import PatchedFile
from stagepack_loaders.torch.stage import TorchStage
from stagepack_loaders.torch.weight_gate import GatedModule
from stagepack_loaders.torch.weight_store import (
    LoadedWeights,
    StageWeights,
    StoredTensors,
    WeightCache,
    stored_bytes,
    written_buffers,
)
from stagepack_loaders.update_report import UpdateReport
from stagepack_loaders.weight_changes import WeightChanges


def check_update(stages: Mapping[int, TorchStage]) -> None:
    """Check that stages can be replaced by the same ones with other weights; see `Runtime.check_update`."""
    for stage_number, stage in stages.items():
        if reason := stage.reason_to_keep():
            raise UpdateError(f"stage {stage_number} cannot take other weights: {reason}")


class ComposedTensors:
    """The bytes of stored tensors that deltas have made for stages before, of other entry points, by weight file and name."""

    def __init__(self) -> None:
        self.of_file: defaultdict[tuple[str, torch.device], dict[str, torch.Tensor]] = defaultdict(dict)


class StagedStore:
    """A `WeightStore` of the weights of a new version. A weight that has not changed is the tensor of the running stage.

    running: the stages that run.
    stored: the stored tensors of each of them, by name.
    stages: what the new ones need.
    shared: what they share with stages of other entry points.
    """

    def __init__(
        self,
        running: Mapping[int, TorchStage],
        stored: Mapping[int, StoredTensors],
        stages: Mapping[int, StageWeights],
        changes: WeightChanges,
        shared: SharedObjects,
    ) -> None:
        self._running = {number: stage.weights_by_value() for number, stage in running.items()}
        self._stored = stored
        self._changes = changes
        # Buffers that calls write have new memory, and so has all that shares it.
        self._state_tensors = {
            weight.stored for stage in stages.values() for weight in stage.graph.weights if stage.is_state(weight)
        }
        self._written_buffers = written_buffers(next(iter(stages.values())).bundle)
        self._cache = shared.get(WeightCache, WeightCache)
        self._composed = shared.get(ComposedTensors, ComposedTensors)

    def has_gate(self, stage: StageWeights) -> bool:
        """See `WeightStore`."""
        return False

    def open(self, stages: Sequence[StageWeights], *, verify: bool) -> None:
        """See `WeightStore`. Files of which no tensor is needed are not read."""
        needed: dict[str, dict[str, StoredTensor]] = {}
        for stage in stages:
            for weight in stage.graph.weights:
                if not weight.zeros and self._is_new(stage, weight):
                    path, stored = stage.stored_tensors[weight.stored]
                    needed.setdefault(path.name, {})[stored.name] = stored
        bundle, whole_files, problems = stages[0].bundle, [], []
        for file_name, tensors in needed.items():
            patch = self._changes.patch_of(file_name)
            if patch is None:
                whole_files.append(file_name)
                continue
            composed = self._composed.of_file[file_name, stages[0].device]
            patched = PatchedFile(
                bundle=bundle,
                entry=bundle.files[file_name],
                patch=patch,
                changes=self._changes,
                needed=sorted(
                    (tensor for name, tensor in tensors.items() if name not in composed),
                    key=lambda tensor: tensor.start,
                ),
                running=self._running_bytes(stages, file_name),
                composed=composed,
            )
            contents, file_problems = patched.compose(verify=verify)
            problems += file_problems
            composed.update(contents)
            for tensor_name, content in contents.items():
                self._cache.add(tensors[tensor_name], content, stages[0].device)
        raise_problems(bundle.causes(problems))
        self._cache.open_files(bundle, whole_files, stages[0].loading, verify=verify)

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
        if weight.zeros or not self._written_buffers.isdisjoint(weight.names):
            # A buffer that calls of other entry points write keeps its content, as it does there.
            return stage.is_state(weight)
        path, stored = stage.stored_tensors[weight.stored]
        return weight.stored in self._state_tensors or self._changes.is_changed(path.name, stored)

    def _running_bytes(self, stages: Sequence[StageWeights], file_name: str) -> dict[str, torch.Tensor]:
        """The bytes of the stored tensors of a file, by name: those of weights that are whole tensors at the same place in both files."""
        found: dict[str, torch.Tensor] = {}
        for stage in stages:
            running, stored = self._running[stage.stage_number], self._stored[stage.stage_number]
            for weight in stage.graph.weights:
                if weight.zeros or weight.base is not None or weight.stored in self._state_tensors:
                    continue
                path, tensor = stage.stored_tensors[weight.stored]
                former_path, former = stored.get(weight.stored, (None, None))
                is_at_place = former_path is not None and former_path.name == file_name and former == tensor
                if path.name == file_name and is_at_place and tensor.name not in found and tensor.end > tensor.start:
                    found[tensor.name] = stored_bytes(running[weight.value])
        return found


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
        named_weights = loading.shared.get(NamedWeights, NamedWeights)
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
        # The folder of a bundle that runs may be gone, which updates from whole bundles do not need.
        needs_running = any(
            changes.patch_of(name) is not None for stage in weights.values() for name in stage.file_names
        )
        stored: dict[int, StoredTensors] = {
            number: changes.running.tensors(number, stage.graph) if needs_running else {}
            for number, stage in running.items()
        }
        stores = {
            device: StagedStore(running, stored, _on_device(weights, device), changes, loading.shared)
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
    code = replace(running.code, adapters=AdapterCalls(bundle, [value.name for value in running.graph.inputs]))
    if isinstance(code.compiled_module, GatedModule):
        code = replace(code, compiled_module=None)
    state_names = bundle.stages[code.stage_number].state
    return TorchStage(code, loaded.tensors, running.device, state_names, written_buffers=written_buffers(bundle))
