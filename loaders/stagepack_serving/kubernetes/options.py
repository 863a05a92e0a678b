"""What the caller decides about a deployment."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleVolume:
    """The volume that has the folder of the bundle, for all pods.

    Attributes:
        kind: a claim of a persistent volume, a folder of each node, or an image that is mounted (Kubernetes 1.33 or newer).
        source: the name of the claim, the folder, or the reference of the image.
    """

    kind: Literal["claim", "host", "image"]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentOptions:
    """The options of a deployment.

    Attributes:
        name: the name of the group, and by which clients call the model.
        image: the container image, with stagepack, torch and the extra ``serve``.
        bundle_path: the path of the bundle in the containers, with ``#NAME`` if one of several entry points is served.
        volume: the volume that is mounted at the parent folder of `bundle_path`; None if the image has the bundle.
        replicas: how many groups of pods there are.
        pods: the number of pods of a group.
        processes_per_pod: the number of processes of each pod.
        cpus: CPUs of each process, which is also the number of its threads.
        gpu_resource: the resource of Kubernetes of which each process gets one; None for stages on the CPU.
        pod_memory: bytes of memory of each pod; None for what is estimated.
        max_batch_size: as for ``stagepack serve``.
        max_sequences: as for ``stagepack serve``.
        linger: as for ``stagepack serve``, in seconds.
        drain: as for ``stagepack serve``, in seconds.
        allow_ops: as for ``stagepack serve``.
        imports: as for ``stagepack serve``.
        serve_arguments: further arguments of ``stagepack serve``.
    """

    name: str
    image: str
    bundle_path: str
    volume: BundleVolume | None
    replicas: int
    pods: int
    processes_per_pod: int
    cpus: int
    gpu_resource: str | None
    pod_memory: int | None
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
