"""Writes a bundle into a model repository of Triton: one model for each stage, and an ensemble that connects them.

Sources: https://github.com/triton-inference-server/server, docs/user_guide/model_repository.md, and architecture.md beside it, section
"Ensemble Models".
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from stagepack.errors import InputError, OperatorError, OutputExistsError, StagepackError, WriteError, first_line
from stagepack.format.bundle_files import read_manifest
from stagepack.format.contract import determined_symbols
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.output_file import TemporaryFolder, exchange_paths
from stagepack.format.own_folders import check_outside_bundles
from stagepack.format.reader import Bundle
from stagepack.format.rules import MANIFEST_NAME
from stagepack.format.shapes import format_guard, symbol_names
from stagepack.graph.rows.batch_dimension import batch_dimension
from stagepack_serving.protocol.interface import Interface, InterfaceTensor, build_model_config
from stagepack_serving.triton.model_configs import (
    PYTHON_BACKEND,
    RepositoryOptions,
    TritonModel,
    build_part_config,
    stage_models,
)

_RESULTS_MODULE = "results_model"
# The first line of every configuration that stagepack writes.
CONFIG_MARKER: Final = b"# Written by stagepack.\n"
_CONFIG_NAME: Final = "config.pbtxt"
_OWN_FILES: Final = frozenset({_CONFIG_NAME, "1/model.py", "1/.keep"})
# The Python of the server writes it when it imports model.py.
_COMPILED_CODE: Final = re.compile(r"1/__pycache__/model\.[\w.-]+\.pyc", re.ASCII)
_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
# Triton runs a file named model.py or libtriton_python.so in the folder of a model, and a stranger chooses the names in a bundle.
_FILE_SUFFIXES: Final = (".json", ".msgpack", ".safetensors", ".onnx")
# The code of a model in the Python backend. The Python of the server must have stagepack installed.
_MODEL_CODE: Final = '"""Written by stagepack."""\n\nfrom stagepack_serving.triton.{module} import TritonPythonModel as TritonPythonModel\n'


def _check_guards(bundle: Bundle) -> None:
    """Check that each guard can be checked by a stage, from the sizes of the inputs that it gets."""
    edges = {edge.name: edge for edge in bundle.edges}
    symbols = bundle.entry_point.symbols
    known = [determined_symbols([edges[name] for name in stage.inputs], symbols) for stage in bundle.stages]
    for guard in bundle.entry_point.guards:
        compared = {*symbol_names(guard.left), *symbol_names(guard.right)}
        if not any(compared <= stage_symbols for stage_symbols in known):
            raise OperatorError(
                f"the model was captured for {format_guard(guard)}, and no stage gets all of these sizes: Triton would not check it: "
                "cut the bundle into fewer stages (stagepack recut)"
            )


class _EnsembleWiring:
    """The tensors of an ensemble, and the edges whose values they carry.

    An ensemble returns each output of a part under one name only, and cannot return its own inputs. Results that need more than that are
    copied by an additional model.
    """

    def __init__(self, bundle: Bundle, options: RepositoryOptions) -> None:
        self._options = options
        self._interface = Interface(bundle.entry_point)
        self._edges = {edge.name: edge for edge in bundle.edges}
        outputs = self._interface.outputs.values()
        self._output_of_edge: dict[str, str] = {}
        for tensor in outputs:
            if tensor.edge.producer is not None:
                self._output_of_edge.setdefault(tensor.edge.name, tensor.name)
        self._copied_outputs = [
            tensor for tensor in outputs if self._output_of_edge.get(tensor.edge.name) != tensor.name
        ]

    def results_models(self) -> list[TritonModel]:
        """The model that copies results; none if the ensemble can return all of them."""
        if not self._copied_outputs:
            return []
        source_names = list(dict.fromkeys(tensor.edge.name for tensor in self._copied_outputs))
        sources = [InterfaceTensor(name=edge_name, edge=self._edges[edge_name]) for edge_name in source_names]
        config = build_part_config(self._options, "results", sources, self._copied_outputs)
        config.backend = "python"
        config.instance_group.add(kind=ModelInstanceGroup.KIND_CPU, count=1)
        for tensor in self._copied_outputs:
            config.parameters[tensor.name].string_value = tensor.edge.name
        return [TritonModel(config, (), _RESULTS_MODULE)]

    def ensemble_config(self, parts: Sequence[TritonModel]) -> ModelConfig:
        """The configuration of the ensemble, which clients call."""
        inputs, outputs = self._interface.inputs.values(), self._interface.outputs.values()
        max_batch_size = self._options.max_batch_size
        config = build_model_config(self._options.model_name, inputs, outputs, max_batch_size=max_batch_size)
        config.platform = "ensemble"
        for part in parts:
            step = config.ensemble_scheduling.step.add(model_name=part.config.name, model_version=-1)
            for model_input in part.config.input:
                step.input_map[model_input.name] = self._tensor_name(self._edges[model_input.name])
            for model_output in part.config.output:
                is_result = part.python_module == _RESULTS_MODULE
                step.output_map[model_output.name] = (
                    model_output.name if is_result else self._tensor_name(self._edges[model_output.name])
                )
        return config

    def _tensor_name(self, edge: Edge) -> str:
        """The tensor of the ensemble that carries the value of an edge."""
        if edge.producer is None:
            return edge.name
        return self._output_of_edge.get(edge.name, f"stage_{edge.producer}.{edge.name}")


def is_written_by_stagepack(folder: Path) -> bool:
    """Whether a folder is a model that stagepack has written."""
    config = folder / "config.pbtxt"
    if not config.is_file():
        return False
    with config.open("rb") as file:
        return file.read(len(CONFIG_MARKER)) == CONFIG_MARKER


def find_replaced_models(root: Path, new_names: Sequence[str], *, overwrite: bool) -> list[Path]:
    """Find the models that an ensemble and its parts replace.

    The parts of the old ensemble are the steps of its configuration. A part that no ensemble names is replaced, too, if a new part has its
    name: a writer that was killed may leave one.
    """
    ensemble_name = new_names[-1]
    old_folders = [root / model_name for model_name in reversed(new_names) if os.path.lexists(root / model_name)]
    if not old_folders:
        return []
    if not overwrite:
        raise OutputExistsError(
            f"{old_folders[0]}: exists already: choose another name (--name), or replace the ensemble of this name and its parts "
            "(--overwrite)"
        )
    configs = dict(_read_configs(root))
    old_parts = _part_names(configs.get(ensemble_name, ModelConfig()), ensemble_name)
    part_folders = [root / part_name for part_name in old_parts if part_name not in new_names]
    old_folders += [folder for folder in part_folders if os.path.lexists(folder)]
    for folder in old_folders:
        _check_origin(folder, ensemble_name, configs)
        _check_files(folder)
    return old_folders


def _read_configs(root: Path) -> Iterator[tuple[str, ModelConfig]]:
    """Yield the name and the configuration of each model that has one."""
    for path in sorted(root.glob(f"*/{_CONFIG_NAME}")):
        if not path.is_file():
            continue
        try:
            config = text_format.Parse(path.read_bytes(), ModelConfig(), allow_unknown_field=True)
        except (text_format.ParseError, UnicodeDecodeError) as error:
            reason = first_line(error)
            raise OutputExistsError(
                f"{path}: expected a configuration of Triton, which says whether the model uses one that is replaced: {reason}: repair or "
                "remove it"
            ) from None
        yield path.parent.name, config


def _part_names(ensemble: ModelConfig, ensemble_name: str) -> list[str]:
    """The steps of an ensemble that have the names of its own parts."""
    part_pattern = re.compile(rf"{re.escape(ensemble_name)}_(stage_\d+|results)", re.ASCII)
    step_names = dict.fromkeys(step.model_name for step in ensemble.ensemble_scheduling.step)
    return [step_name for step_name in step_names if part_pattern.fullmatch(step_name)]


def _check_origin(folder: Path, ensemble_name: str, configs: Mapping[str, ModelConfig]) -> None:
    """Refuse a model that stagepack did not write as the ensemble of this name, or as a part of it alone."""
    if not is_written_by_stagepack(folder):
        raise OutputExistsError(
            f"{folder}: was not written by stagepack, and is not overwritten: choose another name (--name)"
        )
    is_ensemble = configs[folder.name].HasField("ensemble_scheduling")
    if is_ensemble != (folder.name == ensemble_name):
        kind = "an ensemble of its own" if is_ensemble else "a part of an ensemble"
        raise OutputExistsError(
            f"{folder}: expected the ensemble {ensemble_name} or a part of it, found {kind}, which is not overwritten: choose another name "
            "(--name)"
        )
    for model_name, config in configs.items():
        step_names = {step.model_name for step in config.ensemble_scheduling.step}
        if model_name != ensemble_name and folder.name in step_names:
            raise OutputExistsError(
                f"{folder}: expected a model that only the ensemble {ensemble_name} uses, found that {model_name} uses it too: choose "
                f"another name (--name), or remove {model_name} first"
            )


def _check_files(folder: Path) -> None:
    """Refuse a model with files that stagepack does not write, which would be deleted."""
    own_files = _OWN_FILES | _bundle_files(folder / "1")
    for path in _files_below(folder):
        relative_path = path.relative_to(folder).as_posix()
        if relative_path not in own_files and not _COMPILED_CODE.fullmatch(relative_path):
            raise OutputExistsError(
                f"{folder}: expected only files that stagepack writes, found {relative_path}, which would be deleted: move it out of the "
                "repository, or choose another name (--name)"
            )


def _bundle_files(version_folder: Path) -> frozenset[str]:
    """The files of the bundle that a model may have, by the manifest in its folder; none if there is no manifest that can be read."""
    try:
        manifest = read_manifest(version_folder)
    except StagepackError:
        return frozenset()
    return frozenset(f"1/{file_name}" for file_name in (MANIFEST_NAME, *(file.name for file in manifest.files)))


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield all that is not a folder, at any depth; a link to a folder is a file, too."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _files_below(path)
        else:
            yield path


def write_repository(
    bundle: Bundle, out: str | os.PathLike[str], options: RepositoryOptions, *, overwrite: bool = False
) -> list[str]:
    """Write the models of a bundle into a model repository.

    Each model is a folder with its configuration, the manifest, and the files of its stage. All models appear together: an error leaves
    the repository as it was. If the process is killed while it replaces models, some may be the old ones: repeat the call.

    overwrite: replace the ensemble of the same name and its parts, if stagepack wrote them and nobody else added files to them.
    """
    if not _MODEL_NAME.fullmatch(options.model_name):
        raise InputError(f"expected a name of letters, digits, '_', '-' and '.', found {options.model_name!r}")
    if bundle.patches is not None:
        raise InputError(f"{bundle.location}: is composed of deltas: write it first (stagepack apply)")
    root = Path(out)
    if bundle.path.resolve() in (root.resolve(), *root.resolve().parents):
        raise InputError(f"{root}: a bundle cannot contain a model repository: choose another folder")
    check_outside_bundles(root / options.model_name, "a model repository")
    bundle.check_digests(bundle.files)
    _check_guards(bundle)
    wiring = _EnsembleWiring(bundle, options)
    parts = [*stage_models(bundle, options), *wiring.results_models()]
    models = [*parts, TritonModel(wiring.ensemble_config(parts))]
    _check_file_names(bundle, models)
    model_names = [model.config.name for model in models]
    try:
        old_folders = find_replaced_models(root, model_names, overwrite=overwrite)
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder(root.resolve() / options.model_name) as temporary:
            for model in models:
                _write_model(bundle, temporary.path / "new" / model.config.name, model, copy=options.copy)
            _put_in_place(temporary.path, root, model_names, old_folders)
    except OSError as error:
        raise WriteError(f"{error.filename2 or error.filename or root}: {error.strerror}") from None
    return model_names


def _check_file_names(bundle: Bundle, models: Sequence[TritonModel]) -> None:
    for model in models:
        for file_name in model.file_names:
            if not file_name.endswith(_FILE_SUFFIXES):
                raise InputError(
                    f"{bundle.location}: expected files that end with {', '.join(_FILE_SUFFIXES)}, found {file_name}: Triton may run files "
                    "with other names, so that they are not put into its repository"
                )


def _put_in_place(temporary: Path, root: Path, model_names: Sequence[str], old_folders: Sequence[Path]) -> None:
    """Put the models of the folder ``new`` into the repository, and those that they replace into the folder ``old``; or change nothing.

    Where the system can exchange two folders, a process that is killed meanwhile leaves each model as it was, or the new one. The ensemble
    is the last: until then the configuration of the old one says which parts are replaced.
    """
    (temporary / "old").mkdir()
    with contextlib.ExitStack() as undo:

        def move(source: Path, target: Path) -> None:
            source.rename(target)
            undo.callback(target.rename, source)

        def replace(model_name: str) -> None:
            source, target = temporary / "new" / model_name, root / model_name
            if target in old_folders and exchange_paths(source, target):
                undo.callback(exchange_paths, source, target)
                return
            if target in old_folders:
                move(target, temporary / "old" / model_name)
            move(source, target)

        for part_name in model_names[:-1]:
            replace(part_name)
        for folder in old_folders:
            if folder.name not in model_names:
                move(folder, temporary / "old" / folder.name)
        replace(model_names[-1])
        undo.pop_all()


def _write_model(bundle: Bundle, folder: Path, model: TritonModel, *, copy: bool) -> None:
    version_folder = folder / "1"
    version_folder.mkdir(parents=True)
    config_text = text_format.MessageToString(model.config)
    (folder / "config.pbtxt").write_bytes(CONFIG_MARKER + config_text.encode())
    if model.python_module is not None:
        code = _MODEL_CODE.format(module=model.python_module)
        (version_folder / "model.py").write_text(code, encoding="utf-8")
    else:
        # Triton requires the folder, and object stores do not keep empty ones.
        (version_folder / ".keep").touch()
    for file_name in model.file_names:
        _add_file(bundle.path / file_name, version_folder / file_name, copy=copy)


def _add_file(source: Path, target: Path, *, copy: bool) -> None:
    if copy:
        shutil.copyfile(source, target)
        return
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        raise WriteError(
            f"{target}: cannot create a hard link to the bundle's file ({error.strerror}): copy the files instead (--copy)"
        ) from None


def batching_obstacle(bundle: Bundle, backend: str) -> str:
    """Find out why Triton cannot batch requests to a bundle in one of `BACKENDS`.

    Triton requires a dimension besides the batch dimension in every tensor. The configuration could add one by ``reshape``, but then
    clients would have to send it.

    The result is the reason; empty if Triton can batch requests.
    """
    dimension = batch_dimension(bundle, bundle.edges)
    if isinstance(dimension, str):
        return dimension
    interface = Interface(bundle.entry_point)
    for tensor in (*interface.inputs.values(), *interface.outputs.values()):
        if len(tensor.shape) == 1:
            return f"{tensor.name} has no dimension besides the batch dimension, which Triton requires"
    numbers = [edge.name for edge in bundle.edges if edge.dtype in SCALAR_DTYPES]
    # The model of a stage in the Python backend reads one number from an element for each row.
    if numbers and backend != PYTHON_BACKEND:
        return f"{numbers[0]} is a number, for which the backend {backend} would get one from each request"
    return ""
