"""What the caller decides about a deployment, and the memory of each pod, from the plan of the bundle."""

from dataclasses import dataclass
from typing import Literal

from stagepack.format.reader import Bundle
from stagepack.format.shapes import example_sizes
from stagepack.graph.rows.row_analysis import batch_dimension
from stagepack_loaders.distributed.process_memory import estimate_memory
from stagepack_loaders.placement import place_stages

# The server in the first process: its libraries, and requests that wait.
_SERVER_BYTES = 512 * 2**20
# torchrun, a process beside those of the stages in each pod.
_LAUNCHER_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleVolume:
    """The volume that has the folder of the bundle, for all pods: by the name of a claim, a folder of each node, or a mounted image."""

    kind: Literal["claim", "host", "image"]  # an image needs Kubernetes 1.33 or newer
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentOptions:
    """The options of a deployment; those from `max_batch_size` on are of ``stagepack serve``.

    Attributes:
        name: the name of the group, and by which clients call the model.
        namespace: the namespace of all objects; None leaves it to whoever applies them.
        bundle_path: the path of the bundle in the containers, with ``#NAME`` if one of several entry points is served.
        digest: of the bundle, which the server must find.
        volume: the volume that is mounted at the parent folder of `bundle_path`; None if the image has the bundle.
        url: where each pod downloads the bundle from before it starts; None if it has it.
        url_secret: the name of a Secret whose keys are environment variables for the download, such as credentials.
        image_pull_secrets: names of Secrets with the credentials of the registry of the image.
        node_selector: the labels of the nodes on which the pods run.
        token_secret: the name of a Secret whose key ``tokens`` is the file of ``--token-file``.
        tls_secret: the name of a Secret with the certificate and the key of the server, as ``tls.crt`` and ``tls.key``.
        replicas: how many groups of pods there are.
        max_surge: how many more groups there are while they are replaced; with 0, one at a time is missing instead.
        pods: the number of pods of a group.
        cpus: CPUs of each process, which is also the number of its threads.
        gpu_resource: the resource of Kubernetes of which each process gets one; None for stages on the CPU.
        pod_memory: bytes of memory of each pod; None for what is estimated.
        operator_port: the port that probes and Prometheus ask; None for that of REST.
    """

    name: str
    namespace: str | None
    image: str
    bundle_path: str
    digest: str
    volume: BundleVolume | None
    url: str | None
    url_secret: str | None
    image_pull_secrets: tuple[str, ...]
    service_account: str | None
    node_selector: tuple[tuple[str, str], ...]
    token_secret: str | None
    tls_secret: str | None
    replicas: int
    max_surge: int
    pods: int
    processes_per_pod: int
    cpus: int
    gpu_resource: str | None
    pod_memory: int | None
    operator_port: int | None
    max_batch_size: int
    max_sequences: int
    linger: float
    drain: float
    allow_ops: tuple[str, ...]
    imports: tuple[str, ...]
    serve_arguments: tuple[str, ...] = ()

    @property
    def process_count(self) -> int:
        """The number of processes of a group."""
        return self.pods * self.processes_per_pod


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSize:
    """A pod of a group: the stages that its processes run, the bytes of their weights, and of the memory that they need on the host."""

    stages: tuple[int, ...]
    weight_bytes: int
    memory: int


def size_pods(bundle: Bundle, options: DeploymentOptions) -> tuple[PodSize, ...]:
    """Return what each pod of a group runs, of at most as many processes as stages, and the memory that it needs."""
    rank_of_stage = tuple(place_stages(bundle.entry_point, range(options.process_count)))
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
