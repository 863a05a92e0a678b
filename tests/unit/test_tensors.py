"""Tensors keep their values, types, strides and shared memory on the road from a model to a file and back."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import stagepack
from stagepack.errors import CutError, UnsupportedError
from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.graph import Graph
from stagepack.format.rules import PADDING_PREFIX
from stagepack.format.validate.graph_rules import check_graph
from stagepack.format.weights import ALIGNMENT, read_weight_header, weight_file_header
from stagepack.linearize.program_tensors import WeightKind
from stagepack.linearize.weight_table import tensor_bytes, weight_table
from stagepack_loaders.torch.weight_store import WeightCache

CPU = torch.device("cpu")
DTYPES = [getattr(torch, name) for name in ITEM_SIZE if name != "complex32"]  # torch cannot copy half complex numbers


@dataclass(frozen=True)
class Read:
    """What came back: the tensors by all their names, and the file they lie in."""

    tensors: Mapping[str, torch.Tensor]
    path: Path


def there_and_back(held: Mapping[str, tuple[WeightKind, torch.Tensor]], path: Path) -> Read:
    """Describe tensors, write them to a file as an export does, and read them as a loader does."""
    table = weight_table(held)
    assert [problem for problem in check_graph(Graph(weights=table.weights), "") if problem.rule.startswith("G")] == []
    head, gaps = weight_file_header(spec for spec, _ in table.stored.values())
    with path.open("wb") as file:
        file.write(head)
        for gap, (_, contiguous) in zip(gaps, table.stored.values(), strict=True):
            file.write(bytes(gap))
            file.write(tensor_bytes(contiguous()))
    places = {name: (path, place) for name, place in read_weight_header(path).items()}
    assert places.keys() == table.stored.keys()
    cache = WeightCache()
    read = {name: cache.read(weight, places, CPU) for weight in table.weights for name in weight.names}
    return Read(read, path)


def octets(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in order, as bytes: equal also where a number is not equal to itself."""
    return bytes(tensor_bytes(tensor.detach().clone(memory_format=torch.contiguous_format)))


def extent(tensor: torch.Tensor) -> range:
    """The addresses that a tensor reaches."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(
        tensor.data_ptr(),
        tensor.data_ptr() + (last + 1) * tensor.element_size() if tensor.numel() else tensor.data_ptr(),
    )


def assert_alike(held: Mapping[str, tuple[WeightKind, torch.Tensor]], read: Read) -> None:
    """Each tensor is what it was; what lay on one storage lies there as it did, and nothing else overlaps."""
    assert read.tensors.keys() == held.keys()
    for name, (kind, tensor) in held.items():
        found = read.tensors[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.requires_grad == tensor.requires_grad
        assert found.is_leaf
        assert isinstance(found, torch.nn.Parameter) == (kind == "parameter")
        assert octets(found) == octets(tensor)
        if tensor.numel():
            strides = zip(found.stride(), tensor.stride(), tensor.shape, strict=True)
            assert all(ours == theirs for ours, theirs, size in strides if size > 1)
    for (one, (_, first)), (other, (_, second)) in itertools.combinations(held.items(), 2):
        if not first.numel() or not second.numel():
            continue
        ours, theirs = read.tensors[one], read.tensors[other]
        if first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr():
            assert ours.data_ptr() - theirs.data_ptr() == first.data_ptr() - second.data_ptr()
        else:
            a, b = extent(ours), extent(theirs)
            assert a.stop <= b.start or b.stop <= a.start


def assert_plain_file(read: Read) -> None:
    """Every tensor lies on a multiple of 64 bytes, and the safetensors library opens the file and sees the same."""
    index = read_weight_header(read.path)
    assert all(place.start % ALIGNMENT == 0 for place in index.values())
    content = read.path.read_bytes()
    with safe_open(read.path, framework="pt") as file:
        names = list(file.keys())
        assert {name for name in names if not name.startswith(PADDING_PREFIX)} == index.keys()
        for name, place in index.items():
            assert octets(file.get_tensor(name)) == content[place.start : place.end]


@st.composite
def models(draw: st.DrawFn) -> dict[str, tuple[WeightKind, torch.Tensor]]:
    """Tensors of any type that lie on a few storages in any way: views, ties, overlaps, gaps, types mixed."""
    held: dict[str, tuple[WeightKind, torch.Tensor]] = {}
    for storage in range(draw(st.integers(1, 3))):
        memory = torch.arange(draw(st.integers(0, 12)) * 16, dtype=torch.uint8).untyped_storage()
        dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2))
        for view in range(draw(st.integers(1, 4))):
            tensor = draw(views(memory, draw(st.sampled_from(dtypes))))
            kind: WeightKind = draw(st.sampled_from(["parameter", "buffer", "non_persistent_buffer", "constant"]))
            trained = draw(st.booleans()) and (tensor.is_floating_point() or tensor.is_complex())
            tensor = torch.nn.Parameter(tensor, trained) if kind == "parameter" else tensor.requires_grad_(trained)
            held[f"s{storage}.v{view}"] = (kind, tensor)
            if draw(st.booleans()):
                held[f"tied.s{storage}.v{view}"] = (kind, tensor)
    return held


@st.composite
def views(draw: st.DrawFn, memory: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that lies on a storage in any way that torch allows."""
    whole = torch.empty(0, dtype=dtype).set_(memory, 0, (memory.nbytes() // dtype.itemsize,), (1,))
    if dtype is torch.bool:
        whole = whole.view(torch.uint8).remainder_(2).view(torch.bool)
    offset = draw(st.integers(0, whole.numel()))
    shape, strides, room = [], [], whole.numel() - offset - 1
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.integers(0, 4 if room >= 0 else 0))
        stride = draw(st.integers(0, max(0, room // (size - 1)) if size > 1 else 5))
        room -= max(0, size - 1) * stride
        shape.append(size)
        strides.append(stride)
    if room < 0 and 0 not in shape:
        shape, strides = [0], [1]
    return whole.as_strided(shape, strides, offset)


@settings(derandomize=True, deadline=None, max_examples=250)
@given(held=models())
def test_any_tensors_come_back_as_they_were(
    held: dict[str, tuple[WeightKind, torch.Tensor]], tmp_path_factory: Any
) -> None:
    read = there_and_back(held, tmp_path_factory.mktemp("weights") / "weights.safetensors")
    assert_alike(held, read)
    assert_plain_file(read)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(held=models(), data=st.data())
def test_what_is_written_through_one_name_is_seen_through_the_others(
    held: dict[str, tuple[WeightKind, torch.Tensor]], data: st.DataObject, tmp_path_factory: Any
) -> None:
    read = there_and_back(held, tmp_path_factory.mktemp("weights") / "weights.safetensors")
    name = data.draw(st.sampled_from(sorted(held)))
    with torch.no_grad():
        held[name][1].detach().zero_()
        read.tensors[name].zero_()
    for other, (_, tensor) in held.items():
        assert octets(read.tensors[other]) == octets(tensor)


def parameter(tensor: torch.Tensor) -> tuple[WeightKind, torch.Tensor]:
    return "parameter", torch.nn.Parameter(tensor)


def buffer(tensor: torch.Tensor) -> tuple[WeightKind, torch.Tensor]:
    return "buffer", tensor


whole = torch.arange(48.0)
tied = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
NAMED: dict[str, dict[str, tuple[WeightKind, torch.Tensor]]] = {
    "tied": {"a": ("parameter", tied), "b": ("parameter", tied)},
    "tied with other kinds": {"a": ("parameter", tied), "b": ("buffer", tied.detach())},
    "transposed": {"a": parameter(torch.arange(12.0).reshape(3, 4).t())},
    "a view of the other": {"a": buffer(whole), "b": buffer(whole[8:24].reshape(4, 4).t())},
    "views that overlap": {"a": buffer(whole[:20]), "b": buffer(whole[10:30])},
    "views apart": {"a": buffer(whole[:8]), "b": buffer(whole[40:])},
    "expanded": {"a": buffer(torch.arange(3.0)[:, None].expand(3, 5))},
    "expanded to a thousand": {"a": buffer(torch.ones(1).expand(1000))},
    "channels last": {"a": parameter(torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))},
    "channels last, of size 1": {"a": parameter(torch.randn(54).as_strided((6, 1, 3, 3), (9, 1, 3, 1)))},
    "with gaps": {"a": buffer(whole[::3])},
    "no dimension": {"a": buffer(torch.tensor(7.0)), "b": buffer(torch.tensor(True))},
    "no elements": {"a": buffer(torch.empty(0, 4)), "b": buffer(torch.empty(3, 0, 2, dtype=torch.int8))},
    "one storage, two types": {"a": buffer(whole.view(torch.int32)[:4]), "b": buffer(whole[2:9])},
    "complex": {"a": buffer(torch.randn(3, 2, dtype=torch.complex128)), "b": buffer(torch.tensor(1 + 2j))},
    "real part of complex": {"a": buffer(z := torch.randn(4, dtype=torch.complex64)), "b": buffer(z.real)},
    "frozen": {"a": ("parameter", torch.nn.Parameter(torch.ones(2), requires_grad=False))},
    "buffer with a gradient": {"a": buffer(torch.ones(4, requires_grad=True)), "b": buffer(torch.ones(4))},
    "view of what has a gradient": {"a": buffer(g := torch.ones(4, requires_grad=True)), "b": buffer(g.detach()[1:3])},
    "special numbers": {"a": buffer(torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]))},
    **{str(dtype): {"a": buffer(torch.ones(5).to(dtype))} for dtype in DTYPES},
}


@pytest.mark.parametrize("held", NAMED.values(), ids=NAMED)
def test_tensors_come_back_as_they_were(held: dict[str, tuple[WeightKind, torch.Tensor]], tmp_path: Path) -> None:
    read = there_and_back(held, tmp_path / "weights.safetensors")
    assert_alike(held, read)
    assert_plain_file(read)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("tied", 48),
        ("a view of the other", 192),
        ("views that overlap", 120),
        ("expanded", 12),
        ("expanded to a thousand", 4),
    ],
)
def test_shared_memory_is_stored_once(name: str, size: int, tmp_path: Path) -> None:
    read = there_and_back(NAMED[name], tmp_path / "weights.safetensors")
    assert sum(place.end - place.start for place in read_weight_header(read.path).values()) == size


sparse = torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (sparse, "'layers.0.weight' cannot be stored: layout torch.sparse_coo"),
        (torch.randn(2, dtype=torch.complex64).conj(), "'layers.0.weight' cannot be stored: lazy conjugate"),
        (torch.empty(3, device="meta"), "'layers.0.weight' has no data: it is on the meta device"),
        (torch.ones(2).as_subclass(type("Odd", (torch.Tensor,), {})), "cannot be stored: class Odd"),
        (torch.empty(2, dtype=torch.bits8), "cannot be stored: dtype torch.bits8"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tensor: torch.Tensor, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        weight_table({"layers.0.weight": ("buffer", tensor)})


class Tied(torch.nn.Module):
    """A model whose first and last layer are one tensor, and whose state is a view of a wider buffer."""

    wide: torch.Tensor
    row: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.middle = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("wide", torch.zeros(3, 4))
        self.register_buffer("row", self.wide[1])

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.middle(self.embed(ids))
        self.row.add_(1)
        return self.head(hidden + self.row), self.wide * 1


def test_a_loaded_model_shares_what_the_model_shares(tmp_path: Path) -> None:
    model, ids = Tied(), torch.arange(6)
    bundle = stagepack.export(model, (ids,), out=tmp_path / "m.stagepack", stages=3)
    pipe = stagepack.load(bundle)
    state = pipe.state_dict()
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert len(list(pipe.parameters())) == len(list(model.parameters())) == 3
    with torch.no_grad():
        state["head.weight"].mul_(2)
        model.head.weight.mul_(2)
        for _ in range(2):
            for found, expected in zip(pipe(ids), model(ids), strict=True):
                assert torch.equal(found, expected)
    assert pipe(ids)[1][1].tolist() == [3.0] * 4
    pipe.reset_state()
    assert pipe(ids)[1][1].tolist() == [1.0] * 4


def test_a_cut_between_two_views_of_written_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CutError, match="'wide' is written, so all operators that touch it must stay in one stage"):
        stagepack.export(Tied(), (torch.arange(6),), out=tmp_path / "m.stagepack", split_at=["head"])
