"""Find operators that return memory which nothing has written: ``python -m tools.operators.unwritten_memory --out FILE [OPERATOR...]``.

Each call runs three times on copies of the same arguments, with the same random numbers, while the C library fills the memory that it gives
out with another pattern. A byte that differs, in a result or in the memory between its elements, was in the memory before. With
``--bundles``, each call is a bundle of one node, which is written, loaded and called as a user's is; without operators, of all that run by
default. Writes a JSON object a line, as `tools.operators.hostile_calls` does, with the calls that differed.
"""

import argparse
import ctypes
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

import stagepack
from stagepack.argument_guards import guarded_operator
from stagepack.errors import StagepackError, UnsupportedError
from stagepack.format.graph import Argument, DeviceArg, Graph, ListArg, Node, Scope, Value, ValueArg
from stagepack.format.manifest import EntryPoint, Producer
from stagepack.format.operators import RUN_BY_DEFAULT, listed_verdicts
from stagepack.format.tree import Parameter, SequenceTree, Signature, ValueLeaf
from stagepack.format.writer import TensorSource
from stagepack.linearize.op_tables import op_row
from stagepack.linearize.program_tensors import constant_argument, dtype_name
from stagepack.partition.costs import graph_costs
from stagepack.partition.cut_options import CutOptions
from stagepack.partition.partitioner import partition_graph
from stagepack.roads.bundle_builder import BundleBuilder, EntryPointContent
from stagepack.torch_internals import OperatorOverload, tree_leaves, tree_map
from stagepack.unwritten_memory import memory_extent
from tools.operators.hostile_arguments import Call
from tools.operators.hostile_calls import CALLS, is_refused, run
from tools.operators.valid_calls import recorded_calls

# Without its cache for each thread, which fills nothing, and without memory of the system, which is zero.
TUNABLES: Final = "glibc.malloc.tcache_count=0:glibc.malloc.mmap_threshold=4294967296"
_PATTERNS: Final = (0x11, 0xEE, 0x5A)
_FILL_OPTION: Final = -6  # M_PERTURB of mallopt(3)
_libc = ctypes.CDLL(None)


def find_unwritten(operator: OperatorOverload, call: Call) -> str:
    """Call an operator as a loader does; return how the calls ended, an outcome of `tools.operators.hostile_calls`."""
    target = guarded_operator(operator)
    if not _is_on_cpu(call) or is_refused(operator, target, call):
        return "refused"

    def answer() -> object:
        arguments = copy_memory(call)
        return target(**arguments), arguments

    return compare(operator, call, answer)


def find_unwritten_in_bundle(operator: OperatorOverload, call: Call) -> str:
    """Call a bundle of one node that calls an operator; return how the calls ended."""
    target = guarded_operator(operator)
    if not _is_on_cpu(call) or is_refused(operator, target, call):
        return "refused"
    try:
        result = target(**copy_memory(call))
    except Exception:  # noqa: BLE001 - operators raise errors of any kind
        return "raised"
    with tempfile.TemporaryDirectory() as folder:
        try:
            inputs = write_bundle(operator, call, result, Path(folder, "one.stagepack"))
            pipeline = stagepack.load(Path(folder, "one.stagepack"))
            pipeline(*copy_memory(inputs))
        except StagepackError:
            return "refused"  # such as a dtype that a bundle cannot hold
        return compare(operator, call, lambda: pipeline(*copy_memory(inputs)))


def compare(operator: OperatorOverload, call: Call, answer: Callable[[], object]) -> str:
    """Compare answers to one call in memory that was filled with other patterns; return how the calls ended."""
    try:
        contents = [_content_with_pattern(answer, pattern) for pattern in _PATTERNS]
    except Exception:  # noqa: BLE001 - operators raise errors of any kind
        return "raised"
    finally:
        _libc.mallopt(_FILL_OPTION, 0)
    if contents[0] == contents[1] == contents[2]:
        return "returned"
    print(operator, tree_map(_shown, call), file=sys.stderr, flush=True)
    return "differed"


def _content_with_pattern(answer: Callable[[], object], pattern: int) -> list[object]:
    _libc.mallopt(_FILL_OPTION, pattern)
    torch.manual_seed(0)
    with torch.no_grad():
        return [_content(leaf) for leaf in tree_leaves(answer())]


def _content(leaf: object) -> object:
    """The bytes of a tensor, with those between its elements; any other result as text."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided or leaf.is_quantized or leaf.is_meta:
        return repr(leaf) if not isinstance(leaf, torch.Tensor) else str(leaf.layout)
    dense = leaf.detach().resolve_conj().resolve_neg()
    memory = dense.as_strided((memory_extent(dense),), (1,)).contiguous()
    return dense.dtype, dense.shape, memory.view(torch.uint8).numpy().tobytes()


def copy_memory(values: Any) -> Any:
    """Return the same values with tensors of the same strides in memory of their own."""

    def copied(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided or not leaf.numel():
            return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
        memory = leaf.as_strided((memory_extent(leaf),), (1,)).clone()
        return memory.as_strided(leaf.shape, leaf.stride(), 0)

    return tree_map(copied, values)


def write_bundle(operator: OperatorOverload, call: Call, result: object, out: Path) -> list[torch.Tensor]:
    """Write a bundle whose one node makes a call with this result; return its inputs: the tensors of the call."""
    tensors: list[torch.Tensor] = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    inputs = [_value(f"input_{index}", tensor) for index, tensor in enumerate(tensors)]
    names = iter(inputs)
    kwargs = tuple((name, _argument(argument, names)) for name, argument in call.items())
    unpack = isinstance(result, list | tuple)
    items = [*result] if isinstance(result, list | tuple) else [result]
    outputs = [_value(f"result_{index}", item) for index, item in enumerate(items)]
    result_names = tuple(value.name for value in outputs if value is not None)
    graph = Graph(
        inputs=tuple(value for value in inputs if value is not None),
        nodes=(Node(op=0, args=(), kwargs=kwargs, outputs=tuple(outputs), unpack=unpack),),
        outputs=result_names,
        ops=(op_row(operator),),
        scopes=(Scope(path=""),),
    )
    cut = partition_graph(graph, graph_costs(graph, {}), CutOptions(stages=1)).cut
    parameters = (Parameter(name=value.name, tree=ValueLeaf(value.name), positional=True) for value in graph.inputs)
    signature = Signature(
        parameters=tuple(parameters), result=SequenceTree(kind="tuple", items=tuple(map(ValueLeaf, result_names)))
    )
    entry_point = EntryPoint(name="forward", signature=signature, stages=(), edges=cut.edges)
    producer = Producer(stagepack=stagepack.__version__, torch=str(torch.__version__))
    builder = BundleBuilder(out=out, producer=producer, device="cpu", files={})
    nothing = TensorSource(specs={}, read=lambda _: ())
    content = EntryPointContent(entry_point=entry_point, stages=cut.stages, record_example=lambda _: nothing)
    builder.add(content, nothing)
    builder.write()
    return tensors


def _value(name: str, value: object) -> Value | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError(f"a result of type {type(value).__name__}")
    return Value(name=name, dtype=dtype_name(value.dtype), shape=tuple(value.shape))


def _argument(argument: object, inputs: Iterator[Value | None]) -> Argument:
    match argument:
        case torch.Tensor():
            value = next(inputs)
            assert value is not None
            return ValueArg(value.name)
        case list() | tuple():
            return ListArg(tuple(_argument(item, inputs) for item in argument))
        case torch.device():
            return DeviceArg(None)
        case _:
            return constant_argument(argument, "an argument")


def _is_on_cpu(call: Call) -> bool:
    devices = [leaf if isinstance(leaf, torch.device) else getattr(leaf, "device", None) for leaf in tree_leaves(call)]
    return all(device is None or device.type == "cpu" for device in devices)


def _shown(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return (
        f"{dtype_name(leaf.dtype)}{list(leaf.shape)} strides {list(leaf.stride())}"
        if leaf.layout == torch.strided
        else leaf
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="qualified names, such as aten.add.Tensor")
    parser.add_argument("--out", type=Path, required=True, help="the file of results, to which lines are appended")
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--bundles", action="store_true", help="call bundles of one node")
    options = parser.parse_args()
    if os.environ.get("GLIBC_TUNABLES") != TUNABLES:  # the C library reads them when the process begins
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "GLIBC_TUNABLES": TUNABLES})  # noqa: S606
    os.environ["STAGEPACK_CHECKED_GRAPHS"] = os.environ["STAGEPACK_VERIFIED_FILES"] = ""
    names = options.operators or sorted(
        name for name, verdict in listed_verdicts().items() if verdict in RUN_BY_DEFAULT
    )
    make_call = find_unwritten_in_bundle if options.bundles else find_unwritten
    run(names, recorded_calls(), options.out, options.calls, make_call)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main()
