"""A bundle and an adapter of it -> a bundle of the merged weights, without a capture; as ``merge_and_unload`` of peft computes them."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

import torch

from stagepack.adapter.document import A_SUFFIX, B_SUFFIX, BIAS_SUFFIX, TENSORS_NAME, LowRankChange
from stagepack.adapter.opened import OpenAdapter, check_fits
from stagepack.adapter.rewrite import computing_dtype
from stagepack.adapter.uses import find_uses
from stagepack.capture.checkpoint import CheckpointTensor
from stagepack.errors import AdapterError
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.file_checks import checked_path
from stagepack.format.graph import Weight
from stagepack.format.listed_files import ListedFiles
from stagepack.format.own_folders import folder_format
from stagepack.format.reader import Bundle
from stagepack.format.rules import PEFT_SETTINGS_NAME
from stagepack.format.weights import StoredTensor
from stagepack.opening import AdapterSource, BundleSource, errors_name_bundle, open_adapter, opened
from stagepack.roads.adapter import write_adapter
from stagepack.roads.replace import write_replaced
from stagepack.roads.stored_bundle import StoredEntryPoint, begin_rewriting, read_entry_points


@errors_name_bundle
def merge_adapter(
    bundle: BundleSource,
    adapter: AdapterSource,
    *,
    out: str | os.PathLike[str],
    allow_ops: Collection[str] = (),
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """Write a bundle whose weights are those of another one with an adapter merged into them.

    The weights have the bits of ``merge_and_unload`` of peft. The new bundle has the graphs and the cut of the old one; it records the
    answer of the merged model to the example. ONNX files belong to the old weights and are left out.

    Args:
        bundle: the bundle that the adapter was made for.
        adapter: the folder that `write_adapter` wrote, its URL, or an opened adapter; or the folder of peft.
        out: the folder to write.
        allow_ops: operators that may run for the example, see `stagepack.load`.
        overwrite: replace a bundle at `out`.
        progress: called with the name of each step.

    Returns:
        The new bundle.

    Raises:
        AdapterError: the adapter is of another bundle, or cannot be merged.
        DigestError, FormatError: a file is damaged, or breaks a rule of the format.
        OutputExistsError, WriteError: the output exists, or cannot be written.

    Examples:
        >>> stagepack.merge_adapter("llama.stagepack", "pirate", out="llama-pirate.stagepack")
    """
    base = opened(bundle)
    progress("check the bundle")
    builder, versions = begin_rewriting(base, out, overwrite=overwrite)
    with _opened_adapter(adapter, base) as opened_adapter:
        entry_points = read_entry_points(base, versions)
        replacements = _Merging(opened_adapter, base, entry_points).replacements()
        return write_replaced(builder, entry_points, replacements, allow_ops, progress)


@contextlib.contextmanager
def _opened_adapter(adapter: AdapterSource, base: Bundle) -> Iterator[OpenAdapter]:
    """An adapter of a bundle, or of peft, which is written as one of the bundle first."""
    path = None if isinstance(adapter, ListedFiles) else checked_path(adapter, "adapter")
    if path is None or folder_format(path) is not None or not os.path.exists(path / PEFT_SETTINGS_NAME):
        found = open_adapter(adapter)
        found.check_base(base)
        found.verify()
        yield found
        return
    with tempfile.TemporaryDirectory() as folder:
        yield write_adapter(base, path, out=Path(folder) / "adapter")


class _Merging:
    """An adapter, and where the weights are that it is merged into."""

    def __init__(self, adapter: OpenAdapter, base: Bundle, entry_points: list[StoredEntryPoint]) -> None:
        self._adapter = adapter
        self._locations = {name: place for stored in entry_points for name, place in stored.locations.items()}
        self._graphs = [graph for stored in entry_points for graph in stored.graphs]
        self._weights = {name: weight for graph in self._graphs for weight in graph.weights for name in weight.names}
        check_fits(self._graphs, adapter.document, adapter.tensors, adapter.location)

    def replacements(self) -> dict[str, CheckpointTensor]:
        """The merged tensors by stored name, which are computed when they are read."""
        kinds = {
            use.change.module: use.kind for graph in self._graphs for use in find_uses(graph, self._adapter.changes)
        }
        additions: dict[str, list[Callable[[], torch.Tensor]]] = {}
        for change in sorted(self._adapter.document.changes, key=self._place):
            weight = self._weights[change.weight]
            addition = partial(self._addition, change, weight, kinds[change.module])
            additions.setdefault(weight.names[0], []).append(addition)
            if change.module + BIAS_SUFFIX in self._adapter.tensors:
                bias = self._weights.get(f"{change.module}.bias")
                if bias is None:
                    raise AdapterError(
                        f"{change.module}: adds a bias, and the bundle has none that it could be merged into"
                    )
                additions.setdefault(bias.names[0], []).append(partial(self._bias_addition, change, bias))
        merged = {}
        for name in dict.fromkeys((*self._adapter.document.replaced, *additions)):
            weight = self._weights[name]
            if weight.base is not None:
                raise AdapterError(f"{name}: shares memory with other weights of the bundle, and cannot be merged")
            read = partial(self._merged, weight, additions.get(name, ()))
            merged[weight.stored] = CheckpointTensor(
                dtype=getattr(torch, weight.dtype), shape=tuple(weight.shape), read=read
            )
        return merged

    def _place(self, change: LowRankChange) -> int:
        """The place of a module among those that share its weight, in the order of the model, in which peft merges them."""
        names, name = self._weights[change.weight].names, f"{change.module}.weight"
        return names.index(name) if name in names else 0

    def _merged(self, weight: Weight, additions: Collection[Callable[[], torch.Tensor]]) -> torch.Tensor:
        """A weight after all that is added to it. In the order and the dtypes of peft: each sum is rounded to those of the weight."""
        if weight.names[0] in self._adapter.document.replaced:
            merged = self._own_tensor(weight.names[0], weight.dtype)
        elif weight.zeros:
            merged = torch.zeros(weight.shape, dtype=getattr(torch, weight.dtype))
        else:
            path, stored = self._locations[weight.stored]
            merged = _read(path, stored)
        for addition in additions:
            merged += addition()
        return merged

    def _addition(self, change: LowRankChange, weight: Weight, kind: str) -> torch.Tensor:
        dtype = computing_dtype(weight.dtype)
        a, b = (self._own_tensor(change.module + suffix, dtype) for suffix in (A_SUFFIX, B_SUFFIX))
        product = b @ a
        addition = (product if kind == "linear" else product.T) * change.scale
        # peft rounds those of embeddings before it adds them.
        return addition.to(getattr(torch, weight.dtype)) if kind == "embedding" else addition

    def _bias_addition(self, change: LowRankChange, bias: Weight) -> torch.Tensor:
        return self._own_tensor(change.module + BIAS_SUFFIX, computing_dtype(bias.dtype)) * change.scale

    def _own_tensor(self, name: str, dtype: str) -> torch.Tensor:
        path = self._adapter.path / TENSORS_NAME
        return _read(path, self._adapter.tensors[name]).to(getattr(torch, dtype))


def _read(path: Path, stored: StoredTensor) -> torch.Tensor:
    """A tensor of a file, in memory of its own."""
    with path.open("rb") as file:
        file.seek(stored.start)
        content = bytearray(file.read(stored.end - stored.start))
    tensor = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return tensor.view(getattr(torch, TORCH_DTYPES[stored.dtype])).reshape(stored.shape)
