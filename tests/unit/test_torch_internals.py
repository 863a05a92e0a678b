"""A canary for each private name of torch and transformers: a test that fails says what the installed version has changed."""

# Long because it has a test for each private name of one file.

import ast
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
import transformers
from torch.export import Dim

from stagepack import torch_internals
from stagepack.capture.captured_records import CapturedRecord
from tests.zoo.cases import named
from tools.benchmark_models import llama, llama_config

ROOT = Path(__file__).parents[2]


@contextmanager
def canary(consequence: str) -> Iterator[None]:
    """Fail with what does not work any more, whatever torch raises."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a missing name, another signature, another answer
        pytest.fail(f"torch {torch.__version__}: {consequence}; see stagepack/torch_internals.py: {error!r}")


class Net(torch.nn.Module):
    def __init__(self, inner: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = Inner(inner)

    def forward(self, *inputs: Any) -> Any:
        return self.inner(*inputs)


class Inner(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def captured(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> torch.export.ExportedProgram:
    shapes = (tuple({0: Dim("rows")} for _ in inputs),) if dynamic else None
    return torch.export.export(Net(function), inputs, dynamic_shapes=shapes)


def dynamic_size() -> torch.SymInt:
    program = captured(lambda x: x * 2, torch.ones(6, 2), dynamic=True)
    size = next(node for node in program.graph.nodes if node.op == "placeholder").meta["val"].shape[0]
    assert isinstance(size, torch.SymInt)
    return size


def test_operators_are_overloads_with_schemas() -> None:
    with canary("operators cannot be described: nothing can be exported or loaded"):
        operator = torch.ops.aten.add_.Tensor
        assert isinstance(operator, torch_internals.OperatorOverload)
        schema = torch_internals.operator_schema(operator)
        assert [parameter.name for parameter in schema.arguments] == ["self", "other", "alpha"]
        alias_info = schema.arguments[0].alias_info
        assert alias_info is not None
        assert alias_info.is_write
        assert str(schema).startswith("aten::add_.Tensor(Tensor(a!) self")


def test_higher_order_operators_have_a_class() -> None:
    with canary("models with cond, scan and the like cannot be exported or loaded"):
        assert isinstance(torch.ops.higher_order.cond, torch_internals.HigherOrderOperator)
        assert torch.ops.higher_order.cond.name() == "cond"


def test_pipe_split_leaves_its_operator_in_the_graph() -> None:
    from torch.distributed.pipelining import pipe_split

    def split(x: torch.Tensor) -> torch.Tensor:
        pipe_split()
        return x + 1

    with canary("pipe_split is not understood as a place to cut"):
        program = captured(split, torch.ones(2))
        assert torch_internals.PIPE_SPLIT_OPERATOR in {str(node.target) for node in program.graph.nodes}


def test_flop_formulas_are_registered_by_operator() -> None:
    with canary("formulas that users register for custom operators are not used by the planner"):
        assert torch_internals.has_flop_formula(torch.ops.aten.mm.default)
        assert not torch_internals.has_flop_formula(torch.ops.aten.relu.default)
        assert not torch_internals.has_flop_formula(len)


def test_vmap_leaves_functions_that_are_recognized() -> None:
    with canary("models with torch.vmap cannot be exported"):
        program = captured(lambda x: torch.vmap(torch.sum)(x), torch.ones(3, 2))
        targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
        assert any(map(torch_internals.is_vmap_boundary, targets))
        assert not torch_internals.is_vmap_boundary(torch.ops.aten.add.Tensor)


def test_batch_norms_have_a_functional_decomposition() -> None:
    with canary("stages with batch norms that train have no ONNX form"):
        decompositions = torch_internals.batch_norm_decompositions()
        assert torch.ops.aten._native_batch_norm_legit_functional.default in decompositions


def test_tensors_that_share_storage_are_recognized() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with canary("views whose schema does not say so are copied apart"), FakeTensorMode():
        tensor, other = torch.ones(4), torch.ones(4)
        assert torch_internals.storage_identity(tensor) == torch_internals.storage_identity(tensor[1:])
        assert torch_internals.storage_identity(tensor) != torch_internals.storage_identity(other)


def test_writes_of_a_tensor_are_counted() -> None:
    with canary("inputs that a stage has on another device are not written when the stage writes them"):
        tensor = torch.ones(4)
        count = torch_internals.write_count(tensor)
        assert count == torch_internals.write_count(tensor + 1)
        tensor[1:].view(3).add_(1)
        assert count is not None
        assert torch_internals.write_count(tensor) == count + 1
        with torch.inference_mode():
            assert torch_internals.write_count(torch.ones(4)) is None


def test_tensor_subclasses_name_the_tensors_that_they_wrap() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with canary("models with quantized weights of a tensor subclass cannot be exported"):
        assert torch_internals.wrapped_attributes(TwoTensor(torch.ones(2), torch.ones(2))) == ["a", "b"]
        assert torch_internals.wrapped_attributes(torch.ones(2)) == []


def test_symbolic_sizes_have_an_expression_and_their_value_in_the_example() -> None:
    with canary("models with dynamic sizes cannot be exported"):
        program = captured(lambda x: x * 2, torch.ones(6, 2), dynamic=True)
        size = next(torch_internals.symbolic_sizes(program.graph.nodes))
        expression = torch_internals.symbolic_expression(size * 2 + 1)
        symbol = torch_internals.symbolic_expression(size)
        assert isinstance(symbol, sympy.Symbol)
        assert expression == 2 * symbol + 1
        assert torch_internals.example_size(size) == 6
        assert torch_internals.example_symbol_values(program) == {symbol: 6}


def test_programs_have_the_conditions_that_they_were_traced_for(tmp_path: Path) -> None:
    with canary("bundles answer sizes that their programs refuse"):
        model = Net(lambda x: x * 2 if x.shape[0] % 3 == 0 else x)
        program = torch.export.export(model, (torch.ones(6, 2),), dynamic_shapes={"inputs": ({0: Dim.AUTO},)})
        (condition,) = torch_internals.traced_conditions(program) or [sympy.false]
        symbol = torch_internals.symbolic_expression(next(torch_internals.symbolic_sizes(program.graph.nodes)))
        assert condition.free_symbols == {symbol}
        asserted = captured(lambda x: [x, torch._check(x.sum().item() > 2)][0], torch.ones(6))
        assert [str(condition) for condition in torch_internals.asserted_conditions(asserted)]
        torch.export.save(program, tmp_path / "program.pt2")
        loaded = torch.export.load(tmp_path / "program.pt2")
        assert torch_internals.traced_conditions(loaded) is None
        (text,) = torch_internals.guard_texts(loaded)
        assert text.endswith(".size()[0] % 3) == 0")
        assert any(text.startswith(f"(L{path}") for path in torch_internals.input_paths(loaded)[0])


def test_sizes_that_depend_on_data_have_no_value_in_the_example() -> None:
    with canary("the cost of operators whose sizes depend on data is not estimated"):
        program = captured(lambda x: x.nonzero(), torch.ones(4))
        node = next(node for node in program.graph.nodes if str(node.target) == "aten.nonzero.default")
        assert torch_internals.example_size(node.meta["val"].shape[0]) is None


def test_arithmetic_on_sizes_is_made_of_known_functions() -> None:
    with canary("sizes that are divided, or compared, become symbols without a range"):
        size = dynamic_size()
        symbol = torch_internals.symbolic_expression(size)
        functions = torch_internals.symbolic_functions()
        for result, operation in [
            (size // 4, "floordiv"),
            (size % 4, "mod"),
            (torch.sym_max(size, 4), "max"),
            (torch.sym_min(size, 4), "min"),
        ]:
            expression = torch_internals.symbolic_expression(result)
            assert functions[type(expression)] == operation
            assert expression.free_symbols == {symbol}


def test_containers_are_flattened_and_described() -> None:
    with canary("signatures cannot be described: nothing can be exported"):
        leaves, spec = torch_internals.tree_flatten(({"b": 1, "a": [2, 3]}, ()))
        assert leaves == torch_internals.tree_leaves(({"b": 1, "a": [2, 3]}, ())) == [1, 2, 3]
        assert isinstance(spec, torch_internals.TreeSpec)
        dict_spec, empty_spec = torch_internals.tree_children(spec)
        assert (dict_spec.type, list(dict_spec.context)) == (dict, ["b", "a"])
        assert (empty_spec.type, torch_internals.tree_children(empty_spec)) == (tuple, [])
        assert torch_internals.tree_children(dict_spec)[0].is_leaf()
        mapped = torch_internals.tree_map_tensors(lambda tensor: tensor.shape[0], [torch.ones(3), "text"])
        assert mapped == [3, "text"]


def test_containers_are_taken_apart_and_made_of_the_sizes_of_their_items() -> None:
    assert torch_internals.container_items(torch.ones(2)) is None
    assert torch_internals.container_items(None) is None
    assert torch_internals.container_items({"a": 1, "b": [2]}) == [1, [2]]
    assert torch_internals.sizes_of_container({"a": 1, "b": [2]}, [None, []]) == {"a": None, "b": []}
    record = CapturedRecord("module.Record", {"first": 1, "second": (2,)})
    assert torch_internals.container_items(record) == [1, (2,)]
    assert torch_internals.sizes_of_container(record, [None, ()]) == [None, ()]


def test_caches_of_transformers_describe_themselves() -> None:
    model = llama(layers=1, hidden=8, intermediate=8, heads=2, kv_heads=2, vocab_size=16)
    with canary("models that take or return a cache of transformers cannot be exported"):
        torch_internals.register_transformers_caches(model)
        cache = transformers.DynamicCache(config=model.config)
        cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
        leaves, spec = torch_internals.tree_flatten(cache)
        assert len(leaves) == 2
        assert spec.context[torch_internals.TRANSFORMERS_KIND] == "obj"
        kinds = {entry.get(torch_internals.TRANSFORMERS_KIND) for entry in _entries(spec.context)}
        assert {"tensor", *torch_internals.TRANSFORMERS_IMPLIED_KINDS} & kinds >= {"tensor", "dtype"}


def _entries(entry: Any) -> Iterator[dict[str, Any]]:
    if isinstance(entry, dict):
        yield entry
    for item in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list | tuple) else ():
        yield from _entries(item)


def test_transformers_has_an_exporter() -> None:
    with canary("models of transformers that plain export cannot trace cannot be exported"):
        model, inputs = named("decoders-llama")[0].build()
        program = torch_internals.export_by_transformers(model, inputs.kwargs, None)
        assert any(node.op == "output" for node in program.graph.nodes)


def test_modules_hold_children_and_weights_in_dicts() -> None:
    with canary("stages cannot be built, or have other names than the model"):
        module, child = torch.nn.Module(), torch.nn.Linear(2, 2)
        torch_internals.child_modules(module)["forward"] = child
        torch_internals.weight_tensors(module, parameters=True)["training"] = torch.nn.Parameter(torch.ones(1))
        torch_internals.weight_tensors(module, parameters=False)["kept"] = torch.zeros(1)
        torch_internals.weight_tensors(module, parameters=False)["left_out"] = torch.zeros(1)
        torch_internals.mark_non_persistent(module, "left_out")
        assert dict(module.named_children()) == {"forward": child}
        assert {name.partition(".")[0] for name, _ in module.named_parameters()} == {"training", "forward"}
        assert set(module.state_dict()) == {"training", "kept", "forward.weight", "forward.bias"}


def test_the_trace_of_a_module_call_is_seen() -> None:
    calls = []

    def hook(tracer: Any, module: torch.nn.Module, forward: Any, args: Any, kwargs: Any, trace: Any) -> Any:
        paths: list[str] = []

        def forward_with_path(*inner_args: Any, **inner_kwargs: Any) -> Any:
            paths.extend(tracer.module_stack)
            return forward(*inner_args, **inner_kwargs)

        node = torch_internals.traced_node(tracer, args[0])
        result = trace(tracer, module, forward_with_path, args, kwargs)
        result_node = torch_internals.traced_node(tracer, torch_internals.tree_leaves(result)[0])
        calls.append((type(module), paths[-1], node, result_node))
        return result

    with canary("the modules of a bundle have no signatures, so none can be replaced or trained"):
        with torch_internals.traced_module_calls(hook):
            captured(lambda x: x + 1, torch.ones(2))
        kind, path, argument, result = calls[0]
        assert (kind, path) == (Inner, f"{torch_internals.EXPORT_ROOT}.inner")
        assert argument is not None
        assert "add" in str(result)


def test_nodes_that_no_module_made_are_marked() -> None:
    with canary("nodes that no module made belong to a module of a name that torch made up"):
        from torch._export.passes import _node_metadata_hook

        assert _node_metadata_hook._EMPTY_NN_MODULE_STACK_KEY.startswith(torch_internals.NO_MODULE_PREFIX)


def test_operators_without_an_onnx_form_are_named() -> None:
    @torch.library.custom_op("internals_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    with canary("stages without an ONNX form are refused without the name of the operator"):
        program = captured(lambda x: twice(x) + 1, torch.ones(2))
        found = list(torch_internals.operators_without_onnx_form(program))
        assert [name for name, _ in found] == ["internals_test.twice.default"]
        assert [path for path, _ in found[0][1].meta["nn_module_stack"].values()][-1] == "inner"


def test_the_functions_of_the_onnx_exporter_are_read_once() -> None:
    program = captured(lambda x: x + 1, torch.ones(2))
    with canary("each stage that is converted into ONNX takes half a second more"):
        from torch.onnx._internal.exporter._torchlib import _torchlib_registry as functions

        with mock.patch.object(functions, "get_torchlib_ops", wraps=functions.get_torchlib_ops) as read:
            with torch_internals.onnx_functions_read_once():
                for _ in range(2):
                    torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
            assert read.call_count == 1
            torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
            assert read.call_count == 2


def test_further_operators_are_decomposed_for_the_onnx_exporter() -> None:
    program = captured(lambda x: torch.log1p(x), torch.ones(2))
    with canary("stages with operators such as log1p answer otherwise in ONNX Runtime at some values"):
        assert "aten::log1p" in torch_internals.onnx_operator_names()
        table = {torch.ops.aten.log1p.default: lambda x: torch.exp(x) + 1}
        with torch_internals.onnx_decompositions(table):
            converted = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
        assert converted is not None
        assert "Exp" in {node.op_type for node in converted.model.graph.all_nodes()}


def test_the_optimizer_of_onnx_takes_no_small_number_for_zero() -> None:
    program = captured(lambda x: x + 1e-8, torch.ones(2))
    with canary("stages lose an addition of 1e-8 in ONNX Runtime"):
        for is_kept in (False, True):
            converted = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
            assert converted is not None
            with torch_internals.constants_matched_exactly() if is_kept else contextlib.nullcontext():
                converted.optimize()
            assert ("Add" in {node.op_type for node in converted.model.graph.all_nodes()}) == is_kept


def _entries_until(event: threading.Event, folder: Path) -> set[str]:
    """The names of all that is in a folder at any time before an event."""
    entries: set[str] = set()
    while not event.wait(0.001):
        entries |= set(os.listdir(folder))
    return entries


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.xdist_group("compiled")  # in the process of test_compile.py, which has tried the compiler of C++
def test_a_program_is_compiled_into_a_package_and_loaded(tmp_path: Path) -> None:
    number, out, temporary = time.time(), tmp_path / "m.pt2", tmp_path / "temporary"  # torch keeps what it has compiled
    temporary.mkdir()
    with canary("stagepack compile does not work, or what it made cannot be loaded"), ThreadPoolExecutor(1) as threads:
        program = torch.export.export(Inner(lambda x: (x * number + 1,)), (torch.ones(3, dtype=torch.float64),))
        is_compiled = threading.Event()
        looking = threads.submit(_entries_until, is_compiled, temporary)
        try:
            torch_internals.compile_to_package(program, str(out), str(temporary))
        finally:
            is_compiled.set()
        runner = torch_internals.load_package(str(out), torch.device("cpu"))
        assert runner.boxed_run([torch.ones(3, dtype=torch.float64)])[0].tolist() == [number + 1] * 3
    with canary("a compilation that is killed leaves files of the compiler in the folder of temporary files"):
        assert any(entry.endswith(".s") for entry in looking.result())
        assert os.environ.get("TMPDIR") != str(temporary) != tempfile.gettempdir()


def test_what_torch_compile_wraps_is_found_and_its_time_is_counted() -> None:
    with canary("models that torch.compile wraps cannot be exported, or its time is not shown"):
        module = torch.nn.Linear(2, 2)
        compiled = torch.compile(module, backend="eager")
        assert torch_internals.uncompiled_module(compiled) is module  # type: ignore[arg-type]
        assert torch_internals.uncompiled_module(module) is module
        before = torch_internals.torch_compile_seconds()
        compiled(torch.ones(1, 2))
        assert torch_internals.torch_compile_seconds() > before


def test_a_gloo_group_on_the_loopback_interface_sends_bytes() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]

    def create_group(rank: int) -> Any:
        return torch_internals.gloo_process_group(store, rank, 2, timedelta(seconds=30), "127.0.0.1")

    with canary("stages cannot run in processes of their own"), ThreadPoolExecutor(2) as threads:
        first, second = threads.map(create_group, range(2))
        sent, received = torch.arange(5, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
        receive = second.recv([received], 0, 7)
        first.send([sent], 1, 7).wait()
        receive.wait()
        assert torch.equal(sent, received)
        assert not torch.distributed.is_initialized()


def test_a_group_of_nccl_is_made_and_aborted() -> None:
    if not (torch.distributed.is_nccl_available() and torch.cuda.is_available()):
        pytest.skip("this build of torch has no NCCL, or no GPU is there")
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    with canary("values cannot go from GPU to GPU of two processes"):
        group = torch_internals.nccl_process_group(store, 0, 1, timedelta(days=365))
        for operation in ("send", "recv", "abort", "shutdown"):
            assert callable(getattr(group, operation))
        group.abort()
        assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def test_a_condition_is_known_to_the_rest_of_a_trace() -> None:
    def halves(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch_internals.assert_in_trace(x.shape[0] == y.shape[0])
        return x.new_zeros((x.shape[0] + y.shape[0]) // 2)

    with canary("equal sizes stay two"):
        program = captured(halves, torch.randn(3), torch.randn(3), dynamic=True)
        assert len({str(node.meta["val"].shape[0]) for node in program.graph.nodes if node.op == "placeholder"}) == 1


class _MadeSequence(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch_internals.without_recording():
            result = torch.empty(x.shape[0])
        numbers = (0, 1, x.shape[0])
        return torch_internals.recorded_call(torch.ops.aten.linspace.default, numbers, {}, result)


def test_a_call_is_recorded_without_being_made() -> None:
    shapes = {"x": {0: torch.export.Dim("n", min=2, max=9)}}
    program = torch.export.export(_MadeSequence(), (torch.ones(3),), dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.sym_size.int", "aten.linspace.default"]
    assert torch.equal(program.module()(torch.ones(5)), torch.linspace(0, 1, 5))
    result = torch.ones(2)
    assert torch_internals.recorded_call(torch.ops.aten.linspace.default, (0, 1, 2), {}, result) is result


def test_private_names_are_used_in_one_file_only() -> None:
    """Outside of it, no attribute of torch begins with an underscore, and nothing is imported from a module that does."""
    used = {
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in (ROOT / "stagepack", ROOT / "loaders")
        for path in sorted(folder.rglob("*.py"))
        if path.name != "torch_internals.py"
        for line, name in private_names(ast.parse(path.read_text()))
    }
    assert not used


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the private names that a file imports, and those that it takes from torch, an operator, a module or a tensor."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=attribute, value=owner) if _is_private(attribute):
                own = isinstance(owner, ast.Name) and owner.id in ("self", "cls", "os")
                if not own and not (isinstance(owner, ast.Call) and ast.unparse(owner) == "super()"):
                    yield node.lineno, ast.unparse(node)
            case ast.ImportFrom(module=str(module)):
                for name in (*module.split("."), *(alias.name for alias in node.names)):
                    if _is_private(name) and not module.startswith("stagepack"):
                        yield node.lineno, f"{module}: {name}"
            case ast.Import():
                for alias in node.names:
                    if any(map(_is_private, alias.name.split("."))):
                        yield node.lineno, alias.name


def _is_private(name: str) -> bool:
    # The public method of named tuples is no private name.
    return name.startswith("_") and not name.startswith("__") and name != "_replace"


@pytest.mark.process
def test_the_compiler_and_the_onnx_exporter_are_imported_only_when_they_are_used() -> None:
    """Neither by what exports and loads, nor by operators on tensors without memory."""
    code = """
import sys, torch, stagepack.roads.capture_writer, stagepack.roads.onnx, stagepack_loaders.load, stagepack_loaders.torch.compilation
from stagepack.torch_internals import operators_without_compiler
heavy = ["torch._inductor", "torch._dynamo", "torch.onnx._internal.exporter", "transformers"]
print([name for name in heavy if name in sys.modules])
tensor = torch.empty(2, 3, device="meta")
with operators_without_compiler():
    shape = torch.addmm(tensor[0], tensor, tensor.mT @ tensor, alpha=2).mul(3).shape
print(tuple(shape), "torch._dynamo" in sys.modules)
compiled = torch.compile(lambda x: torch._refs.mul(x, 3), backend="eager", fullgraph=False)
print(compiled(torch.ones(2)).tolist(), "torch._dynamo" in sys.modules)
"""
    with canary("importing or loading takes a second longer"):
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        assert done.stdout.splitlines() == ["[]", "(2, 3) False", "[3.0, 3.0] True"]


def test_fake_tensors_and_the_mode_that_sees_operators() -> None:
    seen = []

    class Recorder(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with canary("models cannot be captured without their weights"):
        with torch_internals.FakeTensorMode():
            tensor = torch.ones(2, 3)
        with Recorder():
            parameter = torch.nn.Parameter(tensor[...])
        assert isinstance(parameter, torch_internals.FakeTensor)
        assert seen[-1] is torch.ops.aten.detach.default
        with pytest.raises(torch_internals.DataDependentError):
            parameter.sum().item()


def test_shapes_are_computed_without_data_except_whole_numbers() -> None:
    layer, numbers, rows = torch.nn.Linear(3, 2), torch.tensor([2, 3]), torch.ones(5, 3)
    with canary("example inputs of transformers' models are not tried before the capture"):
        with torch_internals.computing_shapes(layer) as mode:
            number = torch_internals.tensor_without_data(mode, numbers)
            assert number.tolist() == [2, 3]
            result = layer(torch_internals.tensor_without_data(mode, rows))[: int(number.sum())]
            assert torch.compiler.is_compiling()
            with pytest.raises(torch_internals.NO_DATA_ERRORS):
                result.sum().item()
        assert isinstance(result, torch_internals.FakeTensor)
        assert result.shape == (5, 2)
        assert not torch.compiler.is_compiling()
        assert not isinstance(layer.weight, torch_internals.FakeTensor)


def test_checkpoint_tensors_of_transformers_can_be_replaced(tmp_path: Path) -> None:
    config = llama_config(layers=1, hidden=8, intermediate=8, heads=1, kv_heads=1, vocab_size=4)
    model = transformers.LlamaModel(config)
    model.save_pretrained(tmp_path)
    with canary("Hugging Face models are loaded into memory to be exported"):
        replaced = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
        with torch_internals.replaced_checkpoint_tensors(lambda _, __: replaced):
            found = transformers.LlamaModel.from_pretrained(tmp_path)
        assert bool(found.embed_tokens.weight.eq(1).all())
        assert not bool(found.rotary_emb.inv_freq.eq(1).all())


def test_operators_know_their_devices() -> None:
    with canary("a stage with an operator of another device fails at its first call"):
        assert torch_internals.has_kernel(torch.ops.aten.add.Tensor, "cpu")
        assert torch_internals.has_kernel(torch.ops.aten.linear.default, "cpu")
        assert not torch_internals.has_kernel(torch.ops.aten._weight_int4pack_mm.default, "cpu")
        assert torch_internals.has_kernel(torch.ops.aten._weight_int4pack_mm.default, "meta")


def test_programs_of_transformers_say_their_containers() -> None:
    with canary("folders of transformers' exporters are refused"):
        torch_internals.register_transformers_class(transformers.DynamicCache)
        assert torch_internals.is_registered(transformers.DynamicCache)
        program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
        assert '"type": "builtins.tuple"' in torch_internals.input_spec_text(program)
