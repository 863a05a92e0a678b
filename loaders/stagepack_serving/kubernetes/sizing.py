"""The memory of each pod, from the plan of the bundle."""

from dataclasses import dataclass

from stagepack.format.example_sizes import example_sizes
from stagepack.format.reader import Bundle
from stagepack.graph.rows.batch import batch_dimension
from stagepack_loaders.distributed.process_memory import estimate_memory
from stagepack_loaders.distributed.routes import assign_stages
from stagepack_serving.kubernetes.options import DeploymentOptions

# The server in the first process: its libraries, and requests that wait.
_SERVER_BYTES = 512 * 2**20
# torchrun, a process beside those of the stages in each pod.
_LAUNCHER_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSize:
    """A pod of a group.

    Attributes:
        stages: the stages that its processes run.
        weight_bytes: bytes of their weights.
        memory: bytes of memory of the host that its processes need together.
    """

    stages: tuple[int, ...]
    weight_bytes: int
    memory: int


def size_pods(bundle: Bundle, options: DeploymentOptions) -> tuple[PodSize, ...]:
    """Return what each pod of a group runs, and the memory that it needs.

    options: the options; there are at most as many processes as stages.
    """
    rank_of_stage = assign_stages(bundle.entry_point, range(options.process_count))
    batch_symbol = batch_dimension(bundle, bundle.edges)
    sizes = {}
    if not isinstance(batch_symbol, str):
        example_size = example_sizes([batch_symbol])[batch_symbol.name]
        largest_size = max(options.max_batch_size, example_size)
        sizes[batch_symbol.name] = largest_size if batch_symbol.max is None else min(largest_size, batch_symbol.max)
    memory_of_rank = [
        estimate_memory(
            bundle,
            rank_of_stage,
            rank,
            devices=("cpu",) if options.gpu_resource is None else ("cuda",),
            sizes=sizes,
            sequences=options.max_sequences,
        ).total
        for rank in range(options.process_count)
    ]
    memory_of_rank[0] += _SERVER_BYTES
    return tuple(
        _pod_size(bundle, rank_of_stage, memory_of_rank, range(start, start + options.processes_per_pod), options)
        for start in range(0, options.process_count, options.processes_per_pod)
    )


def _pod_size(
    bundle: Bundle, rank_of_stage: tuple[int, ...], memory_of_rank: list[int], ranks: range, options: DeploymentOptions
) -> PodSize:
    stages = tuple(number for number, rank in enumerate(rank_of_stage) if rank in ranks)
    estimated = _LAUNCHER_BYTES + sum(memory_of_rank[rank] for rank in ranks)
    return PodSize(
        stages=stages,
        weight_bytes=sum(bundle.stages[number].weight_bytes for number in stages),
        memory=estimated if options.pod_memory is None else options.pod_memory,
    )
