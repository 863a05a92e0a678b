"""Every private name of torch and transformers that stagepack and its loaders use, and why.

torch gives no notice when a private name changes. Each one is used in this file only, behind a function that says what it does, and
has a test in ``tests/unit/test_torch_internals.py`` that says what broke. Modules that ``import torch`` does not load, such as the
compiler and the ONNX exporter, take seconds: the functions that need them import them.
"""

# Long because it is the one file that may use private names.

import contextlib
import functools
import importlib
import logging
import math
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch.export import ExportedProgram
from torch.fx import Node as FxNode
from torch.fx.experimental import proxy_tensor
from torch.utils import _python_dispatch, _pytree

if TYPE_CHECKING:
    import sympy
    from torch.distributed.distributed_c10d import Store

# Operators. The classes have no public name, and an operator's schema is its only description: parameters, defaults, what it
# writes and what its results alias.

OperatorOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator

# The operator of torch.distributed.pipelining.pipe_split(), which torch registers without a public name.
PIPE_SPLIT_OPERATOR: Final = "pippy._pipe_split.default"


def permanent_function(operator: OperatorOverload) -> Callable[..., Any] | None:
    """Return the function that an operator calls, which a compiler cannot trace; None if it is freed when a library is unloaded."""
    return None if operator._defined_in_python else operator._op


# The product of groups of rows with a matrix each. `torch.nn.functional.grouped_mm`, its public name, is no operator.
GROUPED_PRODUCT: Final = torch.ops.aten._grouped_mm.default
# Operators that torch.export makes of public functions.
LOG_SOFTMAX: Final = torch.ops.aten._log_softmax.default
PRELU: Final = torch.ops.aten._prelu_kernel.default
CAST: Final = torch.ops.aten._to_copy.default
SOFTMAX: Final = torch.ops.aten._softmax.default


def operator_schema(operator: OperatorOverload) -> torch._C.FunctionSchema:
    """Return the schema of an operator: its parameters and results, with their defaults and aliases."""
    return operator._schema


def dispatched_operators() -> dict[str, OperatorOverload]:
    """Return the operators of ATen and prims that the dispatcher of torch can call, by their qualified names.

    ``torch.ops`` lists only operators that were used before, and also operators of TorchScript alone. Inductor adds to prims.
    """
    importlib.import_module("torch._inductor.inductor_prims")
    operators = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, packet_name = schema.name.split("::")
        suffix = f".{schema.overload_name}" if schema.overload_name else ""
        if namespace in ("aten", "prims") and torch._C._dispatch_has_kernel(schema.name + suffix):
            packet = getattr(getattr(torch.ops, namespace), packet_name)
            operators[f"{namespace}.{packet_name}.{schema.overload_name or 'default'}"] = getattr(
                packet, schema.overload_name or "default"
            )
    return operators


def has_kernel(operator: OperatorOverload, device_type: str) -> bool:
    """Return whether an operator runs on a type of device: it has a kernel for it, or consists of other operators.

    What a build of torch without CUDA knows of CUDA says nothing, and other devices are not asked.
    """
    keys = {"cpu": "CPU"} | ({"cuda": "CUDA"} if torch.backends.cuda.is_built() else {})
    key = keys.get(device_type)
    return key is None or torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), key)


def has_flop_formula(operator: object) -> bool:
    """Return whether torch's FLOP counter has a formula for an operator, its own or one that a user registered.

    ``register_flop_formula`` is public, but not the table that it writes to.
    """
    from torch.utils.flop_counter import flop_registry  # noqa: PLC0415 - only captures count

    return isinstance(operator, OperatorOverload) and operator.overloadpacket in flop_registry


def is_vmap_boundary(target: object) -> bool:
    """Return whether the target of a call enters or leaves a level of ``torch.vmap``.

    ``torch.export`` leaves these functions in its graphs, and no public name tells them apart.
    """
    return getattr(target, "__module__", None) == "torch._functorch.predispatch"


def batch_norm_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decomposition of batch norms into one that returns the statistics that it would write.

    ``torch.export.default_decompositions`` has none for this form.
    """
    functional = torch.ops.aten._native_batch_norm_legit_functional.default
    decompositions: dict[Any, Callable[..., Any]] = torch._decomp.get_decompositions([functional])
    return decompositions


def shape_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by which torch finds the shapes of results, a table that callers may patch."""
    table: dict[Any, Callable[..., Any]] = torch._decomp.decomposition_table
    return table


@contextlib.contextmanager
def suppress_log_records(*logger_names: str) -> Iterator[None]:
    """Drop what loggers of torch report, such as a traceback for each operator that fails on tensors without data."""
    loggers = [logging.getLogger(logger_name) for logger_name in logger_names]
    for logger in loggers:
        logger.addFilter(_drop)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_drop)


def _drop(_: logging.LogRecord) -> bool:
    return False


@contextlib.contextmanager
def operators_without_compiler() -> Iterator[None]:
    """Call operators whose implementation is in Python without an import of the compiler, which takes a second.

    The functions that implement elementwise operators on tensors without memory are wrapped, so that the compiler calls them and does
    not trace them; the wrapper asks the compiler how at its first call. Here it finds the function itself as the answer. If a version of
    torch wraps them otherwise, or the compiler is imported already, nothing is changed.
    """
    functions = [] if "torch._dynamo" in sys.modules else list(_functions_hidden_from_compiler())
    for function in functions:
        vars(function).setdefault(_COMPILER_ANSWER, function)
    try:
        yield
    finally:
        for function in functions:
            if vars(function).get(_COMPILER_ANSWER) is function:
                del vars(function)[_COMPILER_ANSWER]


# The attribute in which `torch._disable_dynamo` keeps what the compiler has answered for a function.
_COMPILER_ANSWER: Final = "__dynamo_disable"


def _functions_hidden_from_compiler() -> Iterator[FunctionType]:
    """Yield the functions that decompositions of operators call, and that `torch._disable_dynamo` wraps."""
    wrapper_code = torch._disable_dynamo(lambda: None).__code__  # type: ignore[attr-defined]
    seen: set[int] = set()
    waiting: list[Any] = [
        function for table in torch._decomp.global_decomposition_table.values() for function in table.values()
    ]
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        cells: dict[str, Any] = {}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                cells[name] = cell.cell_contents
        if function.__code__ is wrapper_code and isinstance(cells.get("fn"), FunctionType):
            yield cells["fn"]
        waiting += cells.values()


# Tensors.


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common if and only if they share storage; fake tensors too.

    ``data_ptr`` is 0 for fake tensors. ``copy.deepcopy`` of torch compares the same number.
    """
    return int(tensor.untyped_storage()._cdata)


def write_count(tensor: torch.Tensor) -> int | None:
    """Return how often operators have written the memory of a tensor, as autograd counts; None if it does not count.

    It does not in inference mode. Compiled code counts, too.
    """
    return None if tensor.is_inference() else tensor._version


def wrapped_attributes(tensor: torch.Tensor) -> list[str]:
    """Return the attributes of a tensor subclass that hold the tensors which it wraps; empty for other tensors.

    ``__tensor_flatten__`` is the documented protocol; the check that a class follows it is private.
    """
    if not _python_dispatch.is_traceable_wrapper_subclass(tensor):
        return []
    return list(tensor.__tensor_flatten__()[0])


# Tensors without data, and the mode that sees every operator that is called. The classes are documented, but have no public name.

FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# Raised where an operator needs the data of a fake tensor.
DataDependentError = fake_tensor.DataDependentOutputException
# Errors where a size depends on the data, or an operator has no implementation without data.
NO_DATA_ERRORS = (DataDependentError, fake_tensor.DynamicOutputShapeException, fake_tensor.UnsupportedOperatorException)


@contextlib.contextmanager
def computing_shapes(model: torch.nn.Module) -> Iterator[FakeTensorMode]:
    """Compute shapes and no data within the ``with`` block, also with tensors that have data, such as the weights of a model.

    Weights without data have a mode of their own, which is entered then. ``allow_non_fake_inputs`` is a parameter of its constructor. By
    default torch computes with constants of one element alone. Models see the state of ``torch.export``: else they keep tensors without
    data in their caches (seen: the anchors of D-FINE).
    """
    from torch._export.utils import _compiling_state_context  # noqa: PLC0415 - see above

    tensors = (*model.parameters(), *model.buffers())
    modes = (tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor))
    mode = next(modes, None) or FakeTensorMode()
    allowed, limit = mode.allow_non_fake_inputs, fake_tensor.CONSTANT_NUMEL_LIMIT
    mode.allow_non_fake_inputs, fake_tensor.CONSTANT_NUMEL_LIMIT = True, 2**24
    try:
        with _compiling_state_context(), mode:
            yield mode
    finally:
        mode.allow_non_fake_inputs, fake_tensor.CONSTANT_NUMEL_LIMIT = allowed, limit


def tensor_without_data(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without data in the place of one with data, except whole numbers: operators on these alone are computed.

    Sizes of images and tokens that stand for them decide on shapes. The attribute is how the mode keeps constants of a program.
    """
    fake = mode.from_tensor(tensor)
    if fake is not tensor and not tensor.is_floating_point():
        fake.constant = tensor
    return fake


# Symbolic sizes. A SymInt has no public way to its expression, nor to the size that it had in the example.


def symbolic_expression(size: torch.SymInt | torch.SymBool) -> "sympy.Expr":
    """Return the expression over symbols that a size, or a condition on sizes, equals."""
    return size.node.expr


def example_size(size: torch.SymInt) -> int | None:
    """Return the size that a symbolic size had in the example; None where it depends on data."""
    return int(size.node.hint) if size.node.has_hint() else None


def example_symbol_values(program: ExportedProgram) -> "dict[sympy.Expr, sympy.Integer]":
    """Return the values in the example of the symbols of a program; of one that was read from a file, those of expressions over them."""
    size = next(symbolic_sizes(program.graph.nodes), None)
    return {} if size is None else dict(size.node.shape_env.backed_var_to_val)


def symbolic_sizes(nodes: Iterable[FxNode]) -> "Iterator[torch.SymInt]":
    """Yield the sizes of the values of nodes that are symbolic, and the values that are symbolic integers."""
    for node in nodes:
        for value in tree_leaves(node.meta.get("val")):
            for size in value.shape if isinstance(value, torch.Tensor) else (value,):
                if isinstance(size, torch.SymInt):
                    yield size


def traced_conditions(program: ExportedProgram) -> "list[sympy.Basic] | None":
    """Return the conditions that a program was traced for, beyond the ranges of symbols, over the symbols of its inputs.

    torch records each over the symbols of its time, of which it replaces some afterwards, such as one of two equal sizes.

    A symbol for something else than a size of an input has torch's expression for it as its name, such as ``L['x'].stride()[0]``. None for
    a program that was read from a file, which has only the texts of its conditions.
    """
    size = next(symbolic_sizes(program.graph.nodes), None)
    if size is None:
        return []
    environment = size.node.shape_env
    if not environment.var_to_sources:
        return None
    input_sizes = map(symbolic_expression, symbolic_sizes(program.graph.find_nodes(op="placeholder")))
    input_symbols = {symbol for size in input_sizes for symbol in size.free_symbols}
    source_texts = {symbol: sources[0].name for symbol, sources in environment.var_to_sources.items() if sources}
    # Also one that torch has replaced by its value in the example: a guard says that it is so.
    named = {
        symbol: type(symbol)(source_text)
        for symbol, source_text in source_texts.items()
        if any(part in source_text for part in ("._base", ".stride()", ".storage_offset()"))
    }
    # An argument, in difference to a part of one, that no input is: its value is a constant of the signature.
    constants = {
        symbol: environment.backed_var_to_val[symbol]
        for symbol, source_text in source_texts.items()
        if "()" not in source_text and symbol not in input_symbols and symbol in environment.backed_var_to_val
    }
    return [environment.replace(guard.expr.xreplace(named)).xreplace(constants) for guard in environment.guards]


def asserted_conditions(program: ExportedProgram) -> "Iterator[sympy.Basic]":
    """Yield the conditions on symbols that nodes of a program assert whenever it runs."""
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        value = node.args[0].meta.get("val") if isinstance(node.args[0], FxNode) else None
        if isinstance(value, torch.SymBool):
            yield symbolic_expression(value)


def guard_texts(program: ExportedProgram) -> list[str]:
    """Return the conditions on sizes that a program was traced for, as the texts of Python that files have."""
    return list(getattr(program, "_guards_code", []))


def input_paths(program: ExportedProgram) -> list[list[str]]:
    """Return the paths from the arguments of a program to each of its inputs, such as ``['d']['a'][0]``, in order.

    An input in ``*args`` has two: by the name of the parameter, and by the name that torch gives the argument alone.
    """
    in_spec = program.call_spec.in_spec
    example_inputs = program.example_inputs or _pytree.tree_unflatten([0] * in_spec.num_leaves, in_spec)
    try:
        keyed_leaves, _ = _pytree.tree_flatten_with_path(example_inputs)
    except ValueError:  # a container that does not name its children
        return [[] for _ in range(in_spec.num_leaves)]
    parameter_names = list(getattr(program.module_call_graph[0].signature, "forward_arg_names", None) or ())
    paths = []
    for key_path, _ in keyed_leaves:
        arguments, argument, *inner_keys = key_path
        inner_path = _pytree.keystr(tuple(inner_keys))
        if arguments == _pytree.SequenceKey(1):
            paths.append([f"{_pytree.keystr((argument,))}{inner_path}"])
            continue
        assert isinstance(argument, _pytree.SequenceKey)
        parameter_name = parameter_names[argument.idx] if argument.idx < len(parameter_names) else ""
        variadic_name, _, position = parameter_name.rpartition("_")
        variadic_paths = [f"[{variadic_name!r}][{position}]{inner_path}"] if position.isdecimal() else []
        paths.append([f"[{parameter_name!r}]{inner_path}", *variadic_paths])
    return paths


def assert_in_trace(condition: Any) -> None:
    """Assert a condition on symbolic sizes, which the rest of the trace knows to hold."""
    torch._check(condition)


def symbolic_functions() -> Mapping[type, str]:
    """Return torch's own sympy functions, each with the name of its operation in the format.

    They are imported when they are needed: sympy takes a third of a second.
    """
    functions = importlib.import_module("torch.utils._sympy.functions")
    return {
        functions.FloorDiv: "floordiv",
        functions.CleanDiv: "floordiv",
        functions.Mod: "mod",
        functions.PythonMod: "mod",
        functions.Max: "max",
        functions.Min: "min",
    }


# What a caller says of a dynamic size: `Dim.AUTO`, `Dim.DYNAMIC` and `Dim.STATIC` have no public class.

DimHint: Final = type(torch.export.Dim.AUTO)


def is_automatic(dim: object) -> bool:
    """Return whether a caller leaves it to torch whether a size is dynamic, by ``Dim.AUTO``."""
    return isinstance(dim, DimHint) and dim.type == torch.export.Dim.AUTO.type


# Containers. torch.export describes the call of a model by specs of torch.utils._pytree, which has no public name.

TreeSpec = _pytree.TreeSpec
tree_flatten = _pytree.tree_flatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_unflatten = _pytree.tree_unflatten


def call_leaves(program: ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Return the leaves of the arguments of a program, in the order of its inputs; None if they are not in its containers."""
    in_spec = program.call_spec.in_spec
    _, named = _pytree.tree_unflatten([None] * in_spec.num_leaves, in_spec)
    if not named.keys() <= kwargs.keys():
        return None
    leaves, spec = _pytree.tree_flatten((tuple(args), {name: kwargs[name] for name in named}))
    return leaves if spec == in_spec else None


def call_of_leaves(program: ExportedProgram, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a program, whose leaves `call_leaves` returns."""
    args, kwargs = _pytree.tree_unflatten(leaves, program.call_spec.in_spec)
    return args, kwargs


def input_spec_text(program: ExportedProgram) -> str:
    """Return the containers of the inputs of a program as text, as transformers' exporters write it into their manifest."""
    return _pytree.treespec_dumps(program.call_spec.in_spec)


def tree_map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return the same containers with the results of a function in the place of the tensors."""
    return _pytree.tree_map_only(torch.Tensor, function, tree)


def is_registered(container_type: type) -> bool:
    """Return whether objects of a class are containers, by a registration that has no public form."""
    return container_type in _pytree.SUPPORTED_NODES


def container_items(value: object) -> list[Any] | None:
    """Return the items of a container, as ``torch.export`` takes it apart; None for an object that it takes for one value."""
    node = _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(value))
    return None if node is None else list(node.flatten_fn(value)[0])


def sizes_of_container(value: object, specs: list[Any]) -> Any:
    """Return the specs of dynamic sizes of the items of a container in the form that ``torch.export`` takes.

    It is a container of the same class if the class is one of Python's, and a list for the classes that somebody registered.
    """
    container_type = _pytree._get_node_type(value)
    node = _pytree.SUPPORTED_NODES[container_type]
    is_builtin = container_type in _pytree.BUILTIN_TYPES
    return node.unflatten_fn(specs, node.flatten_fn(value)[1]) if is_builtin else specs


def register_container(
    container_type: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
) -> None:
    """Let torch take objects of a class for containers."""
    name = f"{container_type.__module__}.{container_type.__qualname__}"
    _pytree.register_pytree_node(container_type, flatten, unflatten, serialized_type_name=name)


def tree_children(spec: TreeSpec) -> list[TreeSpec]:
    """Return the specs of the items of a container; `children_specs` is deprecated in favor of `children` since torch 2.12."""
    return list(spec.children()) if callable(getattr(spec, "children", None)) else list(spec.children_specs)


# The key of transformers' description of an object that it registered with _pytree, such as a cache. Under it stands the kind of
# the entry, and "tensor" entries give the number of the child; the context of the node is all that tells the fields of the object.
TRANSFORMERS_KIND: Final = "_t"

# Kinds of entries that the tensors of the object tell, too.
TRANSFORMERS_IMPLIED_KINDS: Final = ("dtype", "device", "layout", "type")


def transformers_exporter() -> Any:
    """Return the module with transformers' exporter: `DynamoExporter` and `DynamoConfig`, which it calls experimental."""
    return importlib.import_module("transformers.exporters.exporter_dynamo")


def export_by_transformers(model: torch.nn.Module, inputs: Mapping[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    """Export a model by transformers' own exporter."""
    exporter_module = transformers_exporter()
    exporter = exporter_module.DynamoExporter()
    config = exporter_module.DynamoConfig(dynamic=dynamic_shapes is not None, dynamic_shapes=dynamic_shapes)
    # transformers 5.17: `export` returns the program, and records gradients.
    if not hasattr(exporter, "export_program"):
        with torch.no_grad():
            return cast("ExportedProgram", exporter.export(model, inputs, config))
    return cast("ExportedProgram", exporter.export_program(model, inputs, config)[0])


def register_transformers_caches(model: torch.nn.Module) -> None:
    """Register the caches of a model of transformers as containers, so that programs take and return them.

    Versions of transformers without an exporter register none.
    """
    with contextlib.suppress(ImportError):
        transformers_exporter().register_cache_pytrees_for_model(model)


def register_transformers_class(container_type: type) -> None:
    """Register a class of transformers as a container, so that torch reads programs that take or return its objects."""
    if not is_registered(container_type):
        transformers_exporter().register_pytree_node(container_type)


@contextlib.contextmanager
def replaced_checkpoint_tensors(read_files: Callable[[list[str], Any], dict[str, torch.Tensor]]) -> Iterator[None]:
    """Let ``from_pretrained`` of transformers load other tensors than the checkpoint files have, by all of its own code.

    `read_files` returns them by their names, of the paths of the files, and the quantizer of the model or None. transformers takes the
    tensors of a state dict only from callers that have no folder; and it converts tensors in threads, which modes of torch do not see,
    unless an environment variable says otherwise.
    """
    model_class = importlib.import_module("transformers").PreTrainedModel
    load_tensors = model_class._load_pretrained_model

    def load_replaced(model: Any, state_dict: Any, files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        if state_dict is None and files is not None:
            state_dict = read_files(files, load_config.hf_quantizer)
        return load_tensors(model, state_dict, files, load_config, *args, **kwargs)

    with (
        mock.patch.object(model_class, "_load_pretrained_model", staticmethod(load_replaced)),
        mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"),
    ):
        yield


@contextlib.contextmanager
def pooled_without_prompts(
    pooling: torch.nn.Module, without_prompt: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Let a ``Pooling`` of sentence-transformers leave tokens out that another function takes from the mask.

    Its own function asks the values of the mask whether there is padding before texts, which ``torch.export`` cannot know.
    """
    with mock.patch.object(pooling, "_exclude_prompt_from_mask", lambda mask, _: without_prompt(mask)):
        yield


# Modules. Names such as "forward" and "training" are taken by attributes of nn.Module, which its public methods refuse, and a
# model may have weights and children of these names all the same.


def child_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the dict in which a module holds its children; writing into it adds a child under any name."""
    return module._modules


def weight_tensors(module: torch.nn.Module, *, parameters: bool) -> dict[str, Any]:
    """Return the dict in which a module holds its parameters, or its buffers; writing into it adds one under any name."""
    return module._parameters if parameters else module._buffers


def mark_non_persistent(module: torch.nn.Module, buffer_name: str) -> None:
    """Leave a buffer out of the module's ``state_dict``."""
    module._non_persistent_buffers_set.add(buffer_name)


# Tracing. torch.export forgets what modules were called with; its tracer has no public hook.

# The name that torch.export gives to the model itself, before the paths of its modules.
EXPORT_ROOT: Final = "_export_root"

# How the module path of a node begins that no module made.
NO_MODULE_PREFIX: Final = "_empty_nn_module_stack"

# Called in the place of the tracer's own function, which is the last argument: tracer, module, forward, args, kwargs, trace.
ModuleCallHook = Callable[..., Any]


@contextlib.contextmanager
def traced_module_calls(hook: ModuleCallHook) -> Iterator[None]:
    """Call a hook for each call of a module in what ``torch.export`` traces inside this context.

    The function that traces the call takes the other arguments of the hook, which returns what it returns. ``tracer.module_stack`` has the
    paths of the modules around.
    """
    tracer_class = proxy_tensor._ModuleStackTracer
    trace_call = tracer_class.call_module

    def call_module(tracer: Any, module: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        return hook(tracer, module, forward, args, kwargs, trace_call)

    with mock.patch.object(tracer_class, "call_module", call_module):
        yield


@contextlib.contextmanager
def traced_nodes(hook: Callable[[Any, FxNode], None]) -> Iterator[None]:
    """Call a hook for each node that ``torch.export`` makes inside this context."""
    tracer_class = proxy_tensor._ModuleStackTracer
    create_node = tracer_class.create_node

    def create_seen_node(tracer: Any, *args: Any, **kwargs: Any) -> FxNode:
        node = create_node(tracer, *args, **kwargs)
        hook(tracer, node)
        return node

    with mock.patch.object(tracer_class, "create_node", create_seen_node):
        yield


def changed_grad_mode(node: FxNode) -> bool | None:
    """Return the grad mode that a node of a trace sets, or None if it sets none."""
    return bool(node.args[0]) if node.target is torch._C._set_grad_enabled else None


def traced_node(tracer: Any, tensor: torch.Tensor) -> FxNode | None:
    """Return the node that makes a tensor in the graph that a tracer writes; None for a tensor that it does not know."""
    slot = proxy_tensor.get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


# The ONNX exporter of torch. It says in its errors which operators it cannot convert, but not in which modules.


@contextlib.contextmanager
def onnx_functions_read_once() -> Iterator[None]:
    """Let torch's ONNX exporter read its tables of functions and of operators once, and not for each program: a second every time."""
    from torch._export import utils  # noqa: PLC0415 - takes seconds
    from torch.onnx._internal.exporter import _registration  # noqa: PLC0415 - takes seconds

    registry = _registration.ONNXRegistry
    read_operators = functools.cache(utils._materialize_cpp_cia_ops)
    with (
        mock.patch.object(registry, "from_torchlib", staticmethod(functools.cache(registry.from_torchlib))),
        mock.patch.object(utils, "_materialize_cpp_cia_ops", read_operators),
    ):
        yield


@contextlib.contextmanager
def signs_of_zeros_kept() -> Iterator[None]:
    """Let torch's ONNX exporter keep -0.0 apart from 0.0: it makes one constant of all that are equal in Python."""
    from torch.onnx._internal.exporter import _building  # noqa: PLC0415 - takes seconds

    get_or_create = _building._get_or_create_constant

    def of_own_sign(constants: Any, constant: Any, *further: Any) -> Any:
        numbers = constant if isinstance(constant, list | tuple) else (constant,)
        has_negative_zero = any(
            type(number) is float and number == 0 and math.copysign(1, number) < 0 for number in numbers
        )
        return get_or_create({} if has_negative_zero else constants, constant, *further)

    with mock.patch.object(_building, "_get_or_create_constant", of_own_sign):
        yield


def onnx_operator_names() -> set[str]:
    """Return the names of the operators that torch's ONNX exporter has a function for, such as ``aten::add.Tensor``."""
    from torch.onnx._internal.exporter import _registration  # noqa: PLC0415 - takes seconds

    return {str(target) for target in _registration.ONNXRegistry.from_torchlib().functions}


@contextlib.contextmanager
def onnx_decompositions(added: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Let torch's ONNX exporter decompose further operators: none of those that it has a function for would be."""
    from torch.onnx._internal.exporter import _decomp  # noqa: PLC0415 - takes seconds

    create_table = _decomp.create_onnx_friendly_decomposition_table

    def with_added(*args: Any) -> dict[Any, Callable[..., Any]]:
        return {**create_table(*args), **added}

    with mock.patch.object(_decomp, "create_onnx_friendly_decomposition_table", with_added):
        yield


@contextlib.contextmanager
def constants_matched_exactly() -> Iterator[None]:
    """Let the optimizer of onnxscript take only 0 for 0: it removes the addition of 1e-8, and the product with 1.000001."""
    from onnxscript.rewriter import _matcher  # noqa: PLC0415 - takes a second

    def is_equal(first: float, second: float, **_: float) -> bool:
        return first == second

    with mock.patch.object(_matcher, "math", SimpleNamespace(isclose=is_equal)):
        yield


def operators_without_onnx_form(program: ExportedProgram) -> Iterator[tuple[str, FxNode]]:
    """Yield the calls for which torch's ONNX exporter has no function: the operator, and the node that calls it."""
    from torch.onnx._internal.exporter import _core, _dispatching, _registration  # noqa: PLC0415 - takes seconds

    registry = _registration.ONNXRegistry.from_torchlib()
    decomposed = _core._prepare_exported_program_for_export(program, registry=registry)
    for module in decomposed.graph_module.modules():
        for node in module.graph.nodes:
            if node.op == "call_function" and _dispatching.dispatch(node, registry)[0] is None:
                # A custom operator that writes is wrapped, and is the first argument of the wrapper.
                wraps = isinstance(node.target, HigherOrderOperator) and isinstance(node.args[0], OperatorOverload)
                yield str(node.args[0] if wraps else node.target), node


# The compiler.


def compile_to_package(program: ExportedProgram, package_path: str, temporary_folder: str) -> None:
    """Compile a program with AOTInductor into a package file; the only way to it is private.

    Files of torch and of the compiler that it starts stay in the temporary folder when this process is killed. Meanwhile the whole process
    uses this folder, as `tempfile` and ``TMPDIR`` have it. Code with a C++ library of its own is refused by a `RuntimeError`:
    `parse_device_str` of torch ends the process that loads it.
    """
    from torch._inductor import aoti_compile_and_package  # noqa: PLC0415 - takes a second
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # noqa: PLC0415

    cache_dir()  # it is in the folder of temporary files, and is kept for the process
    with _temporary_files_in(temporary_folder):
        aoti_compile_and_package(program, package_path=package_path)
    with zipfile.ZipFile(package_path) as package:
        libraries = [package.read(name) for name in package.namelist() if name.endswith(".so")]
    if not all(b"libstdc++." in library or b"libc++." in library for library in libraries):
        os.unlink(package_path)
        compiler = os.environ.get("CXX", "the C++ compiler")
        raise RuntimeError(
            f"{compiler} links the C++ library into the code, which ends its process: choose another, as CXX=g++"
        )


@contextlib.contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    python_folder, system_folder = tempfile.tempdir, os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = python_folder
        if system_folder is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = system_folder


def load_package(package_path: str, device: torch.device) -> Any:
    """Load a package file of AOTInductor.

    ``torch._inductor.aoti_load_package`` does the same after two seconds, in which it imports the compiler.
    """
    device_index = -1 if device.index is None else device.index
    return torch._C._aoti.AOTIModelPackageLoader(package_path, "model", False, 1, device_index)


def uncompiled_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``torch.compile`` wrapped; a module that it did not wrap as it is."""
    # Not imported: who called torch.compile has imported it.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    while eval_frame is not None and isinstance(module, eval_frame.OptimizedModule):
        module = module.get_submodule("_orig_mod")
    return module


def torch_compile_seconds() -> float:
    """Return the seconds that ``torch.compile`` has worked in this process; its public counters have no times."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0.0
    utils = importlib.import_module("torch._dynamo.utils")
    return float(sum(utils.compilation_time_metrics.get("_compile.compile_inner", ())))


def draft_export_failures(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> list[str]:
    """Return what ``torch.export.draft_export`` says of the places where an export would stop, each on one line.

    The report is a private attribute of the program; otherwise torch only logs it.
    """
    program = torch.export.draft_export(model, args, dict(kwargs), dynamic_shapes=dynamic_shapes)
    report = program._report  # type: ignore[attr-defined]
    lines = []
    for failure in report.failures:
        data = failure.data
        frames = [frame for frame in data.get("user_stack") or data.get("stack") or [] if isinstance(frame, dict)]
        frame = frames[-1] if frames else {}
        place = f" (line {frame['line']}, in {frame['name']}: {frame.get('loc', '')})" if frames else ""
        what = data.get("expr") or data.get("op") or data.get("reason") or ""
        lines.append(f"{failure.failure_type.name.lower().replace('_', ' ')}: {what}{place}")
    return lines


# Processes.


def gloo_process_group(store: "Store", rank: int, size: int, timeout: timedelta, host_name: str | None) -> Any:
    """Return a gloo process group on the interface of a host name or address; None for the address of the name of this host.

    It is not the default group of ``torch.distributed``, of which a process has only one, and which ``new_group`` needs. Only the options,
    which choose the network interface, are private. It has ``send(tensors, rank, tag)`` and ``recv(tensors, rank, tag)``.
    """
    from torch.distributed.distributed_c10d import ProcessGroupGloo  # noqa: PLC0415 - only distributed pipelines use it

    if host_name is None:
        return ProcessGroupGloo(store, rank, size, timeout)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host_name)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def nccl_process_group(store: "Store", rank: int, size: int, timeout: timedelta) -> Any:
    """Return an NCCL process group, as `gloo_process_group` does. Its operations are those of the current stream.

    An operation whose other side is lost fails, and does not end this process, as torch has it by itself: torch reads that from the
    environment when it makes the group. Only the time limit of the options is private.
    """
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415 - absent from builds for the CPU

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    previous = os.environ.get(variable)
    os.environ[variable] = "0"  # not by `mock`, which empties the environment for a moment: other threads read it
    try:
        return ProcessGroupNCCL(store, rank, size, options)
    finally:
        if previous is None:
            del os.environ[variable]
        else:
            os.environ[variable] = previous


@contextlib.contextmanager
def composites_of_libraries_decomposed() -> Iterator[None]:
    """Let ``torch.export`` trace, within the ``with`` block, what composite operators of libraries call in the place of the operators.

    Their code is how autograd and tensors without data meet them (``CompositeImplicitAutograd``), so that it can be traced; an operator
    with a backward of its own is left as it is. torch decomposes operators at the same place, but none of these in an export.
    """
    handle_decomposition = proxy_tensor.maybe_handle_decomp

    def handle(proxy_mode: Any, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = handle_decomposition(proxy_mode, operator, args, kwargs)
        if result is NotImplemented and is_composite_of_library(operator):
            with proxy_mode:
                return operator.decompose(*args, **kwargs)
        return result

    with mock.patch.object(proxy_tensor, "maybe_handle_decomp", handle):
        yield


def is_composite_of_library(operator: object) -> bool:
    """Return whether an operator that a library defines in Python is other operators in the place of a kernel."""
    if not isinstance(operator, OperatorOverload) or not operator._defined_in_python:
        return False
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, operator.name())
    return has_kernel("CompositeImplicitAutograd") and not any(
        map(has_kernel, ("Meta", "Autograd", "AutogradCPU", "AutogradCUDA"))
    )


def recorded_call(
    operator: OperatorOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: torch.Tensor
) -> torch.Tensor:
    """Record the call of an operator in a trace without calling it, which would make numbers of its symbolic sizes."""
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return result
    tracer: Any = mode.tracer
    proxy_args, proxy_kwargs = _pytree.tree_map(tracer.unwrap_proxy, (args, dict(kwargs)))
    proxy = tracer.create_proxy("call_function", operator, proxy_args, proxy_kwargs)
    tracked: torch.Tensor = proxy_tensor.track_tensor_tree(result, proxy, constant=None, tracer=tracer)
    return tracked


# A context in which calls of operators are not recorded in the trace.
without_recording = proxy_tensor.disable_proxy_modes_tracing
