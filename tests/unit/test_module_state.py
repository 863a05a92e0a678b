"""A module is restored after capture and after each run; what did not change is not written."""

import contextlib
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NoReturn, Self

import pytest
import torch
from torch import nn

import stagepack
from stagepack.capture.model_runs import preserve_module
from stagepack.errors import CaptureError
from tests.modules import module_of


class FrozenDict(OrderedDict[str, Any]):
    """A dict that refuses every method that changes it, as the configuration of a diffusers model does."""

    frozen = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.frozen = True

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a FrozenDict cannot be changed")

    __delitem__ = clear = pop = popitem = setdefault = update = refuse

    def __setitem__(self, key: str, value: Any) -> None:
        if self.frozen:
            self.refuse()
        super().__setitem__(key, value)

    def __getitem__(self, key: str) -> NoReturn:
        raise AssertionError("the methods of a container's own class are not called")

    __iter__ = items = values = keys = __getitem__  # type: ignore[assignment]


class WeakList(list[Any]):
    """A list whose own methods are not called."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("the methods of a container's own class are not called")

    clear = extend = __getitem__ = __iter__  # type: ignore[assignment]


class Net(nn.Module):
    """A module that changes everything it holds, and may then fail."""

    calls: torch.Tensor

    def __init__(self, fail: bool) -> None:
        super().__init__()
        self.config = FrozenDict(width=4, sizes=[1, 2])
        self.table = {"nested": {"list": [torch.ones(1)]}}
        self.counts: Any = defaultdict(int, a=1)
        self.items = WeakList((1, 2))
        self.recent = deque([1, 2], maxlen=2)
        self.seen = {1, 2}
        self.pair = ([1], {"x": 1})
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))
        self.fail = fail

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        OrderedDict.__setitem__(self.config, "added", 1)
        self.table["nested"]["list"].append(x)
        self.counts["b"] += 1
        list.append(self.items, 3)
        self.recent.append(3)
        self.seen.add(3)
        self.pair[0].append(2)
        self.pair[1]["y"] = 2
        self.last = x
        del self.table
        self.extra = nn.Linear(4, 4)
        self.calls.add_(1)
        y: torch.Tensor = self.linear(x)
        if self.fail:
            raise RuntimeError("not today")
        return y


def check_restored(net: Net) -> None:
    assert list(OrderedDict.__iter__(net.config)) == ["width", "sizes"]
    assert net.table == {"nested": {"list": [torch.ones(1)]}}
    assert net.counts == {"a": 1}
    assert net.counts.default_factory is int
    assert list.__eq__(net.items, [1, 2])
    assert (net.recent, net.recent.maxlen) == (deque([1, 2]), 2)
    assert net.seen == {1, 2}
    assert net.pair == ([1], {"x": 1})
    assert not hasattr(net, "last")
    assert [name for name, _ in net.named_children()] == ["linear"]
    assert net.calls.item() == 0


@pytest.mark.parametrize("fail", [False, True])
def test_attributes_and_containers_are_restored(fail: bool) -> None:
    net = Net(fail)
    config, table, attribute_names = net.config, net.table, list(vars(net))
    random_state = torch.get_rng_state()
    with contextlib.suppress(RuntimeError), preserve_module(net):
        torch.rand(1)
        net(torch.ones(4))
    check_restored(net)
    assert net.config is config
    assert net.table is table
    assert list(vars(net)) == attribute_names
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_list_that_holds_itself_is_restored() -> None:
    net, loop = nn.Module(), list[Any]()
    net.loop = loop  # type: ignore[assignment]
    loop.append(loop)
    with preserve_module(net):
        loop.clear()
    assert loop[0] is loop


class Positions:
    """A table that is made by the first call, as some models keep it in an object that is no module."""

    def __init__(self) -> None:
        self.table: list[torch.Tensor] | None = None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = [torch.arange(8.0).cos()]
        return self.table[0][ids]


def test_the_attributes_of_objects_are_restored(tmp_path: Path) -> None:
    net, ids = module_of(lambda self, ids: self.positions(ids) + 1), torch.arange(4)
    positions: Any = Positions()
    net.positions = positions
    bundle = stagepack.export(net, (ids,), out=tmp_path / "m.stagepack")
    assert positions.table is None
    assert torch.equal(net(ids), stagepack.load(bundle)(ids))


def test_a_capture_that_fails_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    net = Net(fail=True)
    with pytest.raises(CaptureError, match="Net cannot be captured: not today"):
        stagepack.export(net, (torch.ones(4),), out=tmp_path / "m.stagepack")
    check_restored(net)
    assert type(net.calls) is torch.Tensor


def test_a_model_with_a_frozen_configuration_is_exported(tmp_path: Path) -> None:
    class Configured(nn.Linear):
        config = None

    net = Configured(4, 4)
    net.config = FrozenDict(width=4)  # type: ignore[assignment]
    x = torch.ones(4)
    bundle = stagepack.export(net, (x,), out=tmp_path / "m.stagepack")
    assert torch.equal(stagepack.load(bundle)(x), net(x))
    assert len(net.config) == 1  # type: ignore[arg-type]


def test_what_did_not_change_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.BatchNorm1d(4)
    written: list[int] = []
    copy = torch.UntypedStorage.copy_

    def recording_copy(storage: Any, source: Any) -> Any:
        written.append(storage.data_ptr())
        return copy(storage, source)

    monkeypatch.setattr(torch.UntypedStorage, "copy_", recording_copy)
    with preserve_module(net):
        net.running_mean.add_(1)  # type: ignore[union-attr]
        net.running_var.fill_(float("nan"))  # type: ignore[union-attr]
    changed = {net.running_mean.data_ptr(), net.running_var.data_ptr()}  # type: ignore[union-attr]
    assert changed <= set(written)
    assert net.num_batches_tracked.data_ptr() not in written  # type: ignore[union-attr]
    assert net.running_var.tolist() == [1] * 4  # type: ignore[union-attr]


def test_one_part_that_cannot_be_restored_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = nn.BatchNorm1d(4)
    net = nn.Sequential(norm)
    mean, variance, random_state = norm.running_mean, norm.running_var, torch.get_rng_state()
    assert mean is not None
    assert variance is not None
    copy = torch.UntypedStorage.copy_

    def failing_copy(storage: Any, source: Any) -> Any:
        if storage.data_ptr() == mean.data_ptr():
            raise MemoryError("no memory")
        return copy(storage, source)

    monkeypatch.setattr(torch.UntypedStorage, "copy_", failing_copy)

    def change() -> None:
        with preserve_module(net):
            mean.add_(1)
            variance.add_(1)
            net[0].note = "new"  # type: ignore[assignment]
            torch.rand(1)

    says = r"Sequential is changed, .*: the content of a buffer: MemoryError: no memory$"
    with pytest.raises(CaptureError, match=says):
        change()
    restored = norm.running_var
    assert restored is not None
    assert restored.tolist() == [1] * 4
    assert not hasattr(net[0], "note")
    assert torch.equal(torch.get_rng_state(), random_state)


class Pair(torch.Tensor):
    """A tensor that consists of two others and has no memory of its own."""

    @staticmethod
    def __new__(cls: type[Self], a: torch.Tensor, b: torch.Tensor) -> Self:
        pair: Self = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)
        pair.a, pair.b = a, b  # type: ignore[attr-defined]
        return pair

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is not torch.ops.aten.detach.default:
            raise AssertionError(f"{function} is called")
        (pair,) = args
        return cls(pair.a, pair.b)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None


def test_buffers_of_other_kinds() -> None:
    net = nn.Module()
    a, b = torch.ones(2), torch.ones(2)
    net.pair = nn.Buffer(Pair(a, b))
    net.meta = nn.Buffer(torch.ones(2, device="meta"))
    net.sparse = nn.Buffer(torch.ones(2).to_sparse())
    net.empty = nn.Buffer(torch.ones(0))
    mapped = torch.ones(4).share_memory_()
    net.first, net.last = nn.Buffer(mapped[:2]), nn.Buffer(mapped[2:])
    with preserve_module(net):
        a.add_(1)
        net.last.mul_(3)
    assert a.tolist() == [1, 1]
    assert mapped.tolist() == [1] * 4
