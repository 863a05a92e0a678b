"""Check the ONNX files of stages, then make sessions of them."""

import os
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import onnxruntime

from stagepack.adapter.adapted_bundle import AdaptedBundle
from stagepack.errors import OperatorError
from stagepack.format.reader import Bundle, OnnxFile
from stagepack_loaders.base import Loading
from stagepack_loaders.file_leases import has_lease, kept_files
from stagepack_loaders.onnxruntime.adapted_stage import StackedFile, StageAdapters
from stagepack_loaders.onnxruntime.initializers import initializers_in_files
from stagepack_loaders.onnxruntime.stage import OnnxRuntimeStage, SessionWeights
from stagepack_loaders.onnxruntime.values import PROVIDERS, ProviderDevice
from stagepack_loaders.weight_files import WeightFile, open_weight_files


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedOnnxRuntimeStage:
    """A stage whose ONNX file is checked, and whose weights are not read yet.

    Attributes:
        graph_content: the content of its graph file, which says what the weights are.
        onnx: its ONNX file; with adapters, one that applies them.
        adapters: those that change it.
        loading: what the caller asks for.
        spins: its threads wait for work in a loop. Those of stages that take turns must not: they would keep each other from working.
    """

    bundle: Bundle
    stage_number: int
    device: ProviderDevice
    graph_content: bytes
    onnx: OnnxFile
    adapters: StageAdapters | None
    loading: Loading
    spins: bool

    @property
    def runtime(self) -> str:
        """The name of the runtime."""
        return OnnxRuntimeStage.runtime

    def weight_files(self) -> tuple[str, ...]:
        """Return the names of the files that hold its weights, and the tensors of its ONNX file."""
        stage_entry = self.bundle.stages[self.stage_number]
        assert stage_entry.onnx is not None
        return (*stage_entry.weights, *stage_entry.onnx.weights)

    def finish(self, *, verify: bool) -> OnnxRuntimeStage:
        """Make the session of the stage, which reads its weights."""
        weight_files = open_weight_files(self.bundle, self.weight_files(), self.loading, verify=verify)
        return self.finish_from(weight_files, verified=verify)

    def finish_from(self, weight_files: Mapping[str, WeightFile], *, verified: bool) -> OnnxRuntimeStage:
        """Make the session of the stage."""
        own_files = {file_name: weight_files[file_name] for file_name in self.weight_files()}
        # ONNX Runtime reads no file through a link that leaves the folder (https://github.com/microsoft/onnxruntime/issues/27353).
        is_mapped = all(
            has_lease(weight_file.content) and self.bundle.has_own(file_name)
            for file_name, weight_file in own_files.items()
        )
        weights = SessionWeights(self.bundle, self.stage_number, self.graph_content, own_files, mapped=is_mapped)
        if not is_mapped:
            weights.keep(self.bundle.stages[self.stage_number].state, own_files, verified=verified)
        # ONNX Runtime takes no model without outputs.
        stacked = None if self.adapters is None else self.adapters.read(verify=verified)
        session = self._make_session(own_files, stacked, is_mapped=is_mapped) if self.onnx.model.outputs else None
        return OnnxRuntimeStage(
            self.bundle,
            self.stage_number,
            self.device,
            session,
            weights,
            self.onnx.model.unconditional,
            None if self.adapters is None else self.adapters.check_rows,
        )

    def _make_session(
        self, weight_files: Mapping[str, WeightFile], stacked: StackedFile | None, *, is_mapped: bool
    ) -> onnxruntime.InferenceSession:
        """Make the session. It works on mapped files as far as it does not rearrange their tensors, and copies what it needs of others.

        stacked: the tensors of adapters.
        """
        providers: list[Any] = [PROVIDERS["cpu"]]
        if self.device.type != "cpu":
            providers.insert(0, (PROVIDERS[self.device.type], {"device_id": self.device.index}))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised
        options.intra_op_num_threads = _thread_count()
        if not self.spins:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        folder = str(self.bundle.path.absolute())
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        on_files = self.device.type == "cpu" and is_mapped
        found = initializers_in_files(self.onnx.model, weight_files) if on_files else None
        values = {} if found is None else {**found, **({} if stacked is None else stacked.values)}
        for initializer_name, value in values.items():
            options.add_initializer(initializer_name, value)
        if found is None:
            contents = {file_name: file.content for file_name, file in weight_files.items()}
            contents |= {} if stacked is None else {stacked.file_name: stacked.content}
            sizes = [len(content) for content in contents.values()]
            options.add_external_initializers_from_files_in_memory(list(contents), list(contents.values()), sizes)
        # What it computes once from initializers on files, it reads from these, by their paths.
        read_again = {} if found is None else weight_files
        with kept_files({self.bundle.path / file_name: file.content for file_name, file in read_again.items()}):
            session = self._new_session(options, providers)
        # The session has no reference of its own.
        weakref.finalize(session, values.clear).atexit = False
        return session

    def _new_session(self, options: onnxruntime.SessionOptions, providers: list[Any]) -> onnxruntime.InferenceSession:
        try:  # from the bytes that were checked, not from the file
            return onnxruntime.InferenceSession(self.onnx.content, options, providers=providers, enable_fallback=0)
        except Exception as error:  # noqa: BLE001 - errors of onnxruntime have no other common base
            error_message = " ".join(str(error).split())[:500]
            version = onnxruntime.__version__
            raise OperatorError(
                f"stage {self.stage_number}: ONNX Runtime {version} cannot run it: {error_message}"
            ) from None


def _thread_count() -> int:
    """The threads of a session: as many as torch and other libraries take by ``OMP_NUM_THREADS``; 0 is the default of ONNX Runtime."""
    first_level = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first_level) if first_level.isdecimal() else 0


def finish_stages(
    bundle: Bundle, stages: Mapping[int, PreparedOnnxRuntimeStage], *, verify: bool
) -> dict[int, OnnxRuntimeStage]:
    """Make the sessions of stages; see `stagepack_loaders.base.Runtime.finish_stages`."""
    # All at once: a file of one chunk is hashed by one thread.
    names = dict.fromkeys(file_name for stage in stages.values() for file_name in stage.weight_files())
    loadings = [stage.loading for stage in stages.values()]
    weight_files = open_weight_files(bundle, names, loadings[0], verify=verify) if loadings else {}

    def finish(stage: PreparedOnnxRuntimeStage) -> OnnxRuntimeStage:
        return stage.finish_from(weight_files, verified=verify)

    # A session is made by one thread, most of the time without the GIL: three sessions of 0.9 s took 0.5 s on two processors.
    with ThreadPoolExecutor(max(1, len(stages))) as pool:
        return dict(zip(stages, pool.map(finish, stages.values()), strict=True))


def prepare_onnx_stages(
    bundle: Bundle, placement: Mapping[int, ProviderDevice], loading: Loading
) -> dict[int, PreparedOnnxRuntimeStage]:
    """Read and check the ONNX files of stages; see `stagepack_loaders.base.Runtime.prepare`."""
    # All at once: a remote bundle downloads several files at a time.
    stages = [bundle.stages[stage_number] for stage_number in placement]
    bundle.fetch(file_name for stage in stages for file_name in (stage.graph, *stage.weights, *stage.onnx_files))
    prepared = {}
    for stage_number, device in placement.items():
        onnx = bundle.onnx_file(stage_number)
        adapters = StageAdapters.of(bundle, stage_number, onnx) if isinstance(bundle, AdaptedBundle) else None
        prepared[stage_number] = PreparedOnnxRuntimeStage(
            bundle=bundle,
            stage_number=stage_number,
            device=device,
            graph_content=bundle.read(bundle.stages[stage_number].graph),
            onnx=onnx if adapters is None else adapters.described(onnx),
            adapters=adapters,
            loading=loading,
            spins=len(placement) == 1,
        )
    return prepared
