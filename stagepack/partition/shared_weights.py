"""The bytes of weights that several stages of an entry point share, as far as the manifest tells."""

from collections.abc import Iterable, Iterator

from stagepack.format.chunks import File
from stagepack.format.manifest import EntryPoint
from stagepack.partition.solver import SharedCost

# A safetensors file begins with the length of its header, whose entry of one tensor has 56 bytes.
_LEAST_HEADER_BYTES = 64


def most_weight_bytes(file: File) -> int:
    """Return the bytes that the tensors of a weight file have at the most."""
    return max(0, file.size - _LEAST_HEADER_BYTES)


def weight_costs(entry_point: EntryPoint, files: Iterable[File]) -> Iterator[SharedCost]:
    """Yield the bytes of the weights that only one stage uses, and those of each file that several stages read.

    The manifest states the bytes of the weights of a stage, and the sizes of files with their headers. So the sum for several stages is
    never less than their weights have, and more by at most the headers of the files; for one stage, it is exact.

    files: those of the bundle. Without them, each stage counts the weights that it shares.
    """
    file_sizes = {file.name: most_weight_bytes(file) for file in files}
    stages_of_file: dict[str, list[int]] = {}
    for stage_number, stage in enumerate(entry_point.stages):
        for file_name in stage.weights:
            stages_of_file.setdefault(file_name, []).append(stage_number)
    # Without what all other files of a stage may have at the most; weights of zeros are in no file.
    own_bytes = [stage.weight_bytes for stage in entry_point.stages]
    most_bytes = [sum(file_sizes.get(file_name, 0) for file_name in stage.weights) for stage in entry_point.stages]
    for file_name, users in stages_of_file.items():
        if len(users) > 1 and file_name in file_sizes:
            file_size = file_sizes[file_name]
            least_bytes = (entry_point.stages[user].weight_bytes - most_bytes[user] + file_size for user in users)
            byte_count = max(0, min(file_size, *least_bytes))
            yield SharedCost(cost=byte_count, users=users)
            for user in users:
                own_bytes[user] -= byte_count
    for stage_number, byte_count in enumerate(own_bytes):
        yield SharedCost(cost=byte_count, users=(stage_number,))
