"""What a bundle stores, for another bundle that is made of it: tensors, the recorded example, files such as ``config.json``."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from stagepack.bundle_writing import INDEX_FILE_NAME
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.file_writing import FileRange
from stagepack.format.graph import Weight
from stagepack.format.reader import EXAMPLE_FILE_NAME, Bundle
from stagepack.format.weights import StoredTensor, TensorSpec, read_weight_header
from stagepack.format.writer import TensorSource


def further_files(bundle: Bundle) -> dict[str, bytes]:
    """Return the files of a bundle that depend neither on its cut nor on its weights, such as ``config.json``.

    Raises:
        DigestError: a file is damaged.
    """
    stage_files = {
        file_name for stage in bundle.stages for file_name in (stage.graph, *stage.weights, *stage.onnx_files)
    }
    rewritten_files = stage_files | {EXAMPLE_FILE_NAME, INDEX_FILE_NAME}
    return {file_name: bundle.read(file_name) for file_name in bundle.files if file_name not in rewritten_files}


def recorded_example(bundle: Bundle) -> TensorSource:
    """Return the tensors of the recorded example; none if the bundle has none."""
    if bundle.example is None:
        return stored_tensors({})
    header = read_weight_header(bundle.example)
    return stored_tensors({tensor: (bundle.example, stored) for tensor, stored in header.items()})


def stored_tensors(locations: Mapping[str, tuple[Path, StoredTensor]], weights: Sequence[Weight] = ()) -> TensorSource:
    """Return the tensors of weight files, and the weights of zeros, which no file stores.

    Args:
        locations: the file and the position of each stored tensor, by name.
        weights: weights of which those of zeros are added.
    """
    specs = {
        tensor: TensorSpec(name=tensor, dtype=TORCH_DTYPES[stored.dtype], shape=stored.shape)
        for tensor, (_, stored) in locations.items()
    }
    for weight in weights:
        if weight.zeros:
            specs[weight.stored] = TensorSpec(name=weight.stored, dtype=weight.dtype, shape=weight.shape)
    return TensorSource(specs=specs, read=lambda tensor: [file_range(*locations[tensor])])


def file_range(path: Path, stored: StoredTensor) -> FileRange:
    """Return the bytes of a stored tensor."""
    return FileRange(path=path, start=stored.start, size=stored.end - stored.start)
