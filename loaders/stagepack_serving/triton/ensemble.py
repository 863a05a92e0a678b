"""The ensemble that connects the models of the stages, and the model that copies results.

Source: https://github.com/triton-inference-server/server, docs/user_guide/architecture.md, section "Ensemble Models".
"""

from collections.abc import Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from stagepack.errors import OperatorError
from stagepack.format.contract import determined_symbols
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack.format.shapes import format_guard, symbol_names
from stagepack_serving.protocol.interface import Interface, InterfaceTensor
from stagepack_serving.protocol.model_config import build_model_config
from stagepack_serving.triton.options import RepositoryOptions
from stagepack_serving.triton.stages import stage_models
from stagepack_serving.triton.triton_model import TritonModel, build_part_config

_RESULTS_MODULE = "results_model"


def ensemble_models(bundle: Bundle, options: RepositoryOptions) -> list[TritonModel]:
    """Describe all models of a bundle."""
    _check_guards(bundle)
    wiring = _EnsembleWiring(bundle, options)
    parts = [*stage_models(bundle, options), *wiring.results_models()]
    return [*parts, TritonModel(wiring.ensemble_config(parts))]


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
