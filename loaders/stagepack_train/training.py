"""The stages of one process, which it trains together with other processes.

A checkpoint has weights, the state of an optimizer and the number of steps, by names that all processes agree on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from stagepack.errors import InputError, OptionError
from stagepack.format.contract import bind_call
from stagepack.format.reader import Bundle
from stagepack.torch_internals import weight_tensors
from stagepack_loaders.torch.container import submodule
from stagepack_loaders.torch.stage import TorchStage
from stagepack_train.boundaries import StageBoundary, find_boundaries
from stagepack_train.loss import LossExchange, MicrobatchLoss
from stagepack_train.microbatches import CallInputs, cut_inputs, fingerprint_of
from stagepack_train.pipeline_module import PipelineModule
from stagepack_train.process_watch import ProcessWatch
from stagepack_train.random_numbers import random_numbers_of_stage
from stagepack_train.replicas import TrainingGroups, average_gradients, average_loss
from stagepack_train.schedules import ScheduleCache, splits_backward
from stagepack_train.shared_parameters import GradientSums, find_shared_parameters
from stagepack_train.training_options import TrainingOptions

# Each parameter has entries of its own, so that processes may have other parameters when they read them.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_SMALLEST_NORM = 1e-6  # as in torch
# Samplers of several processes that have different seeds differ at once.
_CHECKED_BATCHES = 2


def module_of(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], buffers: Iterable[tuple[str, torch.Tensor]]
) -> torch.nn.Module:
    """Return modules that hold parameters and buffers under their names."""
    root = torch.nn.Module()
    for tensors, are_parameters in ((parameters, True), (buffers, False)):
        for tensor_name, tensor in tensors:
            *module_path, attribute_name = tensor_name.split(".")
            module = submodule(root, module_path)
            weight_tensors(module, parameters=are_parameters)[attribute_name] = tensor
    return root


def check_state(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that a checkpoint has all entries, and each tensor in its shape."""
    for entry, expected_values in expected.items():
        if entry not in state:
            raise InputError(f"expected the entry {entry} in the checkpoint, found {', '.join(state) or 'none'}")
        if not isinstance(expected_values, Mapping):
            continue
        for key, expected_value in expected_values.items():
            if key not in state[entry]:
                raise InputError(f"expected {key} in the entry {entry} of the checkpoint, found none")
            if isinstance(expected_value, torch.Tensor):
                _check_tensor(state[entry][key], expected_value, f"{entry}, {key}")


def _check_tensor(found: Any, expected: torch.Tensor, location: str) -> None:
    found_text = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
    if found_text != list(expected.shape):
        raise InputError(
            f"{location}: expected a tensor of shape {list(expected.shape)} in the checkpoint, found {found_text}"
        )


def _pipeline_modules(
    stages: Mapping[int, TorchStage], boundaries: Sequence[StageBoundary], options: TrainingOptions
) -> dict[int, PipelineModule]:
    """The stages of this process between their neighbours."""
    random_stages = [number for number, boundary in enumerate(boundaries) if boundary.draws]
    return {
        number: PipelineModule(
            stage,
            boundaries[number],
            random_numbers_of_stage(stage.device, number, random_stages),
            splits_backward=splits_backward(options.schedule),
            recompute=options.recompute,
        )
        for number, stage in stages.items()
    }


class Training:
    """The stages of one process, with the schedule by which all processes train.

    Attributes:
        bundle: the bundle.
        stages: the stages of this process, by stage number.
        rank: the number of this process.
        process_count: the number of processes, of all pipelines.
        group: these processes; None for all.
        allow_ops: as for `stagepack.load`.
        out, overwrite: as for `stagepack.train`.
        steps: the number of steps so far.
    """

    def __init__(
        self,
        bundle: Bundle,
        stages: Mapping[int, TorchStage],
        options: TrainingOptions,
        groups: TrainingGroups,
        watch: ProcessWatch | None,
    ) -> None:
        self.bundle = bundle
        self.stages = dict(stages)
        self.rank = torch.distributed.get_rank(groups.whole)
        self.process_count = torch.distributed.get_world_size(groups.whole)
        self.group = groups.whole
        self._options = options
        self._groups = groups
        self.steps = self._checked_batches = 0
        self.allow_ops, self.out, self.overwrite = options.allow_ops, options.out, options.overwrite
        self._entry_point = bundle.entry_point
        boundaries = find_boundaries(bundle, adapts=options.modules)
        self._own_inputs = {edge.name for number in stages for edge in boundaries[number].model_inputs}
        self._loss_exchange = LossExchange(options.rank_of_stage[-1], groups.pipeline)
        self._is_last = len(bundle.stages) - 1 in stages
        self._modules = _pipeline_modules(stages, boundaries, options)
        results = {edge.name: edge for edge in boundaries[-1].sent}
        self._loss = MicrobatchLoss(self._entry_point.signature.result, results, options)
        self._schedules = ScheduleCache(options, self._modules, boundaries, self._loss, groups.pipeline)
        named_weights = [
            (name, weight) for stage in stages.values() for weight in stage.graph.weights for name in weight.names
        ]
        self._frozen_names = frozenset(
            name
            for name, weight in named_weights
            if weight.kind == "parameter" and not weight.trainable and not options.modules
        )
        # A parameter that has several names is called by the first one, in all processes.
        self._first_names = {name: weight.names[0] for name, weight in named_weights}
        shared_parameters = find_shared_parameters(bundle, options.rank_of_stage)
        pipeline_rank = torch.distributed.get_rank(groups.pipeline)
        self._counted_elsewhere = {name for name, ranks in shared_parameters.items() if ranks[0] != pipeline_rank}
        self._gradient_sums = GradientSums(shared_parameters, dict(self.named_parameters()), groups.pipeline)
        self._watch = watch

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters of this process, each once, with their names in the model."""
        known: set[int] = set()
        for stage in self.stages.values():
            for parameter_name, parameter in stage.named_parameters():
                if id(parameter) not in known:
                    known.add(id(parameter))
                    yield self._first_names.get(parameter_name, parameter_name), parameter

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of this process, each once, for an optimizer."""
        for _, parameter in self.named_parameters():
            yield parameter

    @property
    def module(self) -> torch.nn.Module:
        """The parameters and persistent buffers of this process, in modules by their names in the model.

        So functions that take a model and its optimizer work, such as those of ``torch.distributed.checkpoint.state_dict``. The module
        cannot be called.
        """
        return module_of(self.named_parameters(), self._named_buffers())

    def state_dict(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """Return what a checkpoint of `torch.distributed.checkpoint` needs, for ``save`` and as the tensors that ``load`` fills.

        Tensors have their names in the model, whatever stages and processes there are: a checkpoint can be read by other numbers of both.
        The state of the optimizer is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, flattened.

        Args:
            optimizer: the optimizer of the parameters of this process.

        Returns:
            A dict with the entries ``model``, ``steps``, and ``optimizer`` if there is one.

        Examples:
            >>> state = training.state_dict(optimizer)
            >>> torch.distributed.checkpoint.save(state, checkpoint_id="checkpoints/100")
            >>> state = training.state_dict(optimizer)
            >>> torch.distributed.checkpoint.load(state, checkpoint_id="checkpoints/100")
            >>> training.load_state_dict(state, optimizer)
        """
        state: dict[str, Any] = {"model": dict(self._named_weights()), "steps": torch.tensor(self.steps)}
        if optimizer is not None:
            state["optimizer"] = dict(get_optimizer_state_dict(self.module, optimizer, options=_OPTIONS))
        return state

    def load_state_dict(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Go on from a checkpoint.

        Args:
            state: what `state_dict` returned, with the content of a checkpoint.
            optimizer: the optimizer of the parameters of this process.

        Raises:
            InputError: the checkpoint lacks a weight or another entry, or a tensor has another shape. Nothing is changed then.
        """
        expected_state = self.state_dict(optimizer)
        check_state(state, expected_state)
        with torch.no_grad():
            for weight_name, weight in expected_state["model"].items():
                weight.copy_(state["model"][weight_name])
        self.steps = int(state["steps"])
        if optimizer is not None:
            set_optimizer_state_dict(self.module, optimizer, state["optimizer"], options=_OPTIONS)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their norm over all processes is at most some number; see `torch.nn.utils.clip_grad_norm_`.

        All processes must call it. A parameter of which several processes have a copy counts once.

        Args:
            max_norm: the largest 2-norm.

        Returns:
            The 2-norm before, float64.

        Raises:
            StageLostError: another process is gone.
        """
        gradients = [(name, p.grad) for name, p in self.named_parameters() if p.grad is not None]
        squares = torch.zeros((), dtype=torch.float64)
        for parameter_name, gradient in gradients:
            if parameter_name not in self._counted_elsewhere:
                squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square().cpu()
        with self.guarded():
            torch.distributed.all_reduce(squares, group=self._groups.pipeline)
        norm = squares.sqrt()
        factor = float(max_norm / (norm + _SMALLEST_NORM))
        if factor < 1:
            for _, gradient in gradients:
                gradient.mul_(factor)
        return norm

    def own_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters and persistent buffers that this process saves, each once; all processes together save all of them.

        Raises:
            OptionError: the stages have other weights than the bundle, such as those of adapters.
        """
        found_names = {weight_name for stage in self.stages.values() for weight_name in stage.state_dict()}
        expected_names = {
            weight_name
            for stage in self.stages.values()
            for weight in stage.graph.weights
            if weight.kind in ("parameter", "buffer")
            for weight_name in weight.names
        }
        if found_names != expected_names:
            raise OptionError(
                f"expected the weights of the bundle, found others, such as {min(found_names ^ expected_names)}: merge adapters into the "
                "weights, and put the modules of the stage back, before you save a bundle"
            )
        for weight_name, tensor in self._named_weights():
            if weight_name not in self._counted_elsewhere and not self._groups.replica:
                yield weight_name, tensor

    def _named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters and persistent buffers of this process, each once, without their gradient functions."""
        known: set[int] = set()
        for stage in self.stages.values():
            for any_name, tensor in stage.state_dict(keep_vars=True).items():
                if id(tensor) not in known:
                    known.add(id(tensor))
                    yield self._first_names.get(any_name, any_name), tensor.detach()

    def _named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        parameter_names = {parameter_name for parameter_name, _ in self.named_parameters()}
        for weight_name, tensor in self._named_weights():
            if weight_name not in parameter_names:
                yield weight_name, tensor

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Run a batch forward and backward. Gradients are added to those of the parameters.

        All processes of a pipeline call it with the same batch; each uses what its stages need. With several pipelines, each has a batch
        of its own, of the same size, and gradients are averaged.

        Args:
            *args: the arguments of the model.
            target: a tensor, or a container of tensors, whose first dimension is that of the batch; passed to the loss.
            **kwargs: the keyword arguments of the model.

        Returns:
            The mean loss of the microbatches of all pipelines, in all processes.

        Raises:
            OptionError: a parameter that was frozen at the export requires gradients, or one is frozen in some of its processes; the
                loss is no tensor without dimensions, or has no gradient; or gradients are off.
            InputError: the batch does not fit the bundle, is no multiple of the number of microbatches, or is another one than in other
                processes.
            StageLostError: another process is gone. Gradients and buffers are undefined then: start again from a checkpoint.
        """
        if not torch.is_grad_enabled():
            raise OptionError("gradients are off: call step outside of torch.no_grad and torch.inference_mode")
        arguments = bind_call(self._entry_point.signature, args, kwargs)
        call = cut_inputs(self._entry_point, arguments, self._options.dimensions, self._options.microbatches)
        self._loss.begin(target, call.batch_size)
        self._check_frozen_parameters()
        with self.guarded():
            mean_loss = self._run(call)
        self.steps += 1
        return mean_loss

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context for what waits for the other processes, such as writing a checkpoint.

        An error in the context that comes from the loss of another process is raised as the `StageLostError` that names this process.
        """
        return nullcontext() if self._watch is None else self._watch.step()

    def close(self) -> None:
        """Leave the training, so that the other processes do not count this one as lost. The end of the interpreter does so too."""
        if self._watch is not None:
            self._watch.close()

    def _check_frozen_parameters(self) -> None:
        if not self._frozen_names:
            return
        for parameter_name, parameter in self.named_parameters():
            if parameter.requires_grad and parameter_name in self._frozen_names:
                raise OptionError(
                    f"{parameter_name} was frozen at the export, and gets no gradients: export the model with parameters that require "
                    "gradients, or give modules=True"
                )

    def _run(self, call: CallInputs) -> torch.Tensor:
        """Run the microbatches forward and backward; return their mean loss."""
        schedule, microbatches = self._schedules.find(call.sizes), self._options.microbatches
        batch_number = self.steps * self._groups.replica_count + self._groups.replica
        for module in self._modules.values():
            module.begin(self._options.seed + batch_number * microbatches)
        self._gradient_sums.begin()
        self._loss_exchange.begin(fingerprint_of(call, with_content=self._checked_batches < _CHECKED_BATCHES))
        self._checked_batches += 1
        own_inputs = {input_name: value for input_name, value in call.values.items() if input_name in self._own_inputs}
        if self._is_last:
            schedule.step(target=torch.arange(microbatches), return_outputs=False, **own_inputs)
        else:
            schedule.step(return_outputs=False, **own_inputs)
        mean_loss = self._loss_exchange.finish(self._loss.losses, self._loss.combination.deviation)
        self._gradient_sums.finish()
        if self._groups.replica_count > 1:
            average_gradients(list(self.parameters()), self._groups)
        self._loss_exchange.check()
        return average_loss(mean_loss, self._groups)
