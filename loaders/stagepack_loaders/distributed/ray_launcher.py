"""Processes of stages that Ray places and ends: one actor for each.

Ray places the actors and says when one has died. Tensors do not go through Ray: the processes connect by torch.distributed, as all others.
"""

import os
import re
import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.client import ray as ray_client
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stagepack.errors import GroupError, OptionError
from stagepack.format.reader import Bundle
from stagepack.named_adapters import pinned_adapters
from stagepack_loaders.call_limits import Limits, checked_limits, value_limit
from stagepack_loaders.distributed.membership import GroupOptions, absolute_bundle, group_options
from stagepack_loaders.distributed.pipeline import DistributedPipeline
from stagepack_loaders.distributed.process_group import LOOPBACK, host_name, open_store
from stagepack_loaders.distributed.process_launcher import ProcessLauncher, over_processes
from stagepack_loaders.distributed.process_memory import estimate_memory
from stagepack_loaders.distributed.stage_process import (
    ProcessDescription,
    decode_description,
    encode_description,
    run_process,
)
from stagepack_loaders.distributed.status import ProcessEnd
from stagepack_loaders.options import (
    DEFAULT_IN_FLIGHT,
    AdapterSources,
    Compile,
    LoadOptions,
    ProcessOptions,
    Verify,
    adapter_list,
    folder_name,
)
from stagepack_loaders.placement import place_stages
from stagepack_loaders.preparation import open_for_loading

_END_SECONDS = 5.0
# Ray writes the exit status of a process into the text of its error, if it knows it.
_EXIT_CODE = re.compile(r"exit code (\d+)")


class StageActor:
    """What each actor does. Ray makes the actor of this class by its name, and passes it nothing but text."""

    def locate(self) -> tuple[str, str, str]:
        """Return the number of the node of this actor at Ray, its address, and its name."""
        return ray.get_runtime_context().get_node_id(), get_node_ip_address(), host_name()

    def run(self, description: str) -> None:
        """Run stages until the front closes the pipeline."""
        run_process(decode_description(description))


class _StartedActor:
    """An actor, and what it will say when it has ended."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.result: Any = None


class RayLauncher(ProcessLauncher[_StartedActor]):
    """Starts a group of Ray actors, of which this process is the front, and runs no stages."""

    def __init__(self, bundle: Bundle, options: GroupOptions, resources: Sequence[dict[str, float]]) -> None:
        super().__init__(bundle, options)
        self._resources = resources
        self._placement: Any = None
        self._addresses: dict[int, str] = {}

    def _end_processes(self, *, wait: bool) -> None:
        started_actors, self._processes = list(self._processes.values()), {}
        placement, self._placement = self._placement, None
        if not ray.is_initialized():  # the application has shut Ray down, and the actors with it
            return
        results = [started.result for started in started_actors if started.result is not None]
        if wait and results:
            ray.wait(results, num_returns=len(results), timeout=_END_SECONDS)
        for started in started_actors:
            ray.kill(started.actor)
        if placement is not None:
            remove_placement_group(placement)

    def _start_processes(self) -> Any:
        self._placement = placement = placement_group(list(self._resources), strategy="PACK")
        if not placement.wait(self._options.processes.start_seconds):
            raise GroupError(
                f"expected Ray to place {len(self._resources)} actors, which need {_resources_text(self._resources)}, within "
                f"{self._options.processes.start_seconds:g} s; free are {_free_text()}: add nodes, or ask for less"
            )
        for rank in self._started_ranks:
            self._processes[rank] = _StartedActor(self._make_actor(rank))
        store = self._open_store(self._locate_nodes())
        for rank, started in self._processes.items():
            started.result = started.actor.run.remote(encode_description(self._describe(rank, store)))
        return store

    def _make_actor(self, rank: int) -> Any:
        bundle_index = rank - self._started_ranks.start
        resources = self._resources[bundle_index]
        strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle_index)
        return (
            ray.remote(StageActor)
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                memory=resources.get("memory", 0),
                max_restarts=0,
                scheduling_strategy=strategy,
            )
            .remote()
        )

    def _locate_nodes(self) -> set[str]:
        """Find out where the actors are; return the numbers of their nodes at Ray."""
        seconds = self._options.processes.start_seconds
        deadline = time.monotonic() + seconds
        results = {rank: started.actor.locate.remote() for rank, started in self._processes.items()}
        nodes = set()
        for rank, result in results.items():
            try:
                node, self._addresses[rank], self._hosts[rank] = ray.get(
                    result, timeout=max(0.0, deadline - time.monotonic())
                )
            except GetTimeoutError:
                raise GroupError(
                    f"expected {len(results)} actors within {seconds:g} s, that of rank {rank} has not started"
                ) from None
            except RayError as error:
                end = _actor_end(error)
                raise self._early_end(rank, end.reason, end.exit_status) from None
            nodes.add(node)
        return nodes

    def _open_store(self, nodes: set[str]) -> Any:
        """Open the store of the group where the actors reach it."""
        is_local = nodes == {ray.get_runtime_context().get_node_id()}
        address = LOOPBACK if is_local else get_node_ip_address()
        self._options = msgspec.structs.replace(self._options, is_local=is_local, address=address)
        return open_store(address)

    def _describe(self, rank: int, store: Any) -> ProcessDescription:
        description = super()._describe(rank, store)
        options = msgspec.structs.replace(description.options, address=self._addresses[rank])
        source = self._bundle.source
        if source is not None:  # each node downloads what its actors need into a cache of its own
            url = f"{source.url}{self._bundle.fragment}"
            description = msgspec.structs.replace(description, bundle=url, digest=self._bundle.stored_digest)
        return msgspec.structs.replace(description, options=options)

    def _find_end(self, process: _StartedActor) -> ProcessEnd | None:
        if process.result is None or not ray.wait([process.result], timeout=0)[0]:
            return None
        try:
            ray.get(process.result)
        except RayTaskError as error:
            return ProcessEnd(reason=f"its actor raised {type(error.cause).__name__}: {error.cause}")
        except RayError as error:
            return _actor_end(error)
        return ProcessEnd(reason="its actor has ended its run")


def launch(
    bundle: "str | os.PathLike[str] | Bundle",
    processes: int | None = None,
    *,
    devices: Sequence[str] = ("cpu",),
    runtime: str | Sequence[str] = "torch",
    types: Collection[type] = (),
    allow_ops: Collection[str] = (),
    verify: Verify = "full",
    copy: bool = False,
    compile: Compile = False,
    compiled: str | os.PathLike[str] | None = None,
    adapters: AdapterSources = None,
    imports: Sequence[str] = (),
    max_restarts: int = 0,
    in_flight: int = DEFAULT_IN_FLIGHT,
    limits: Limits | None = None,
    microbatch_size: int | None = None,
    start_seconds: float = 60.0,
    cpus_per_process: float = 1.0,
    gpus_per_process: float = 1.0,
    memory_per_process: int | None = None,
) -> DistributedPipeline:
    """Run the stages of a bundle in actors of Ray, each actor in a process of its own somewhere in the cluster.

    This process is called, and runs no stages. It must be a driver, task or actor in the cluster; it connects to the cluster, or starts
    Ray on this machine, as ``ray.init()`` does, unless that was done before. The actors are in one placement group. Tensors go from
    process to process by torch.distributed, which neither authenticates nor encrypts, on the network between the nodes.

    Args:
        bundle: the folder of the bundle, its URL, or an opened bundle. A folder must have the same path on each node: on a shared file
            system, or copied. From a URL, each actor downloads the files of its stages into the cache of its node, with the credentials
            that are there.
        processes: the number of actors; by default one for each stage. With fewer than stages, consecutive stages share one.
        devices: the device of each stage, in order; with fewer devices, consecutive stages share one. An actor sees only the GPUs that
            Ray gives to it, so ``["cuda"]`` is right for all stages.
        runtime: as for `stagepack.load`.
        types: as for `stagepack.load`.
        allow_ops: as for `stagepack.load`.
        verify: as for `stagepack.load`.
        copy: as for `stagepack.load`.
        compile: as for `stagepack.load`.
        compiled: as for `stagepack.load`.
        adapters: as for `stagepack.load`, on the same paths on each node.
        imports: modules that each actor imports first, such as those that register custom operators.
        max_restarts: how often within an hour all actors are started again after one was lost. They may then be on other nodes.
        in_flight: the largest number of calls on their way through the stages.
        limits: as for `stagepack.load`.
        microbatch_size: as for `stagepack.load`.
        start_seconds: how long to wait for Ray to place the actors, and then for the actors to come, in seconds.
        cpus_per_process: CPUs that Ray reserves for each actor, and, rounded down, threads of each actor, at least 1.
        gpus_per_process: GPUs that Ray reserves for each actor with a stage on another device than the CPU; less than 1 for actors that
            share one.
        memory_per_process: memory that Ray reserves for each actor, in bytes; 0 for none. By default, what the plan of the bundle
            estimates for its stages at the sizes of the example. Set it if calls are much larger.

    Returns:
        The pipeline. Close it to end the actors, or use it in a ``with`` statement.

    Raises:
        OptionError: there are more processes than stages; or the bundle was opened with `storage_options`, which actors do not get; or
            this process is a client of Ray outside of the cluster.
        GroupError: the cluster has not the resources; an actor has not come in time, or has another bundle or other versions.
        StageLostError: an actor died.
        MissingPackageError: Ray is not installed.
        StagepackError: an actor could not load its stages; see `stagepack.load`.

    Examples:
        >>> with stagepack.ray.launch("m.stagepack", devices=["cuda"], max_restarts=3) as pipeline:
        ...     logits = pipeline(input_ids)
    """
    limits = checked_limits(limits)
    load_options = LoadOptions(
        devices=devices,
        runtime=runtime,
        allow_ops=allow_ops,
        verify=verify,
        copy=copy,
        compile=compile,
        compiled=folder_name(compiled),
        adapters=adapter_list(adapters),
    )
    process_options = ProcessOptions(
        imports=imports,
        max_restarts=max_restarts,
        in_flight=in_flight,
        microbatch_size=microbatch_size,
        start_seconds=start_seconds,
    )
    opened_bundle = absolute_bundle(open_for_loading(bundle, verify))
    if opened_bundle.source is not None and opened_bundle.source.url is None:
        raise OptionError(
            f"{opened_bundle.location}: expected a bundle without storage_options, which actors do not get: give credentials by the "
            "environment of each node, or copy the bundle to each node (stagepack pull)"
        )
    load_options = msgspec.structs.replace(load_options, adapters=pinned_adapters(opened_bundle, load_options.adapters))
    options = group_options(load_options, process_options, limits)
    process_count = len(opened_bundle.stages) if processes is None else processes
    placed, options = over_processes(opened_bundle, process_count, options)
    opened_bundle = placed.bundle
    if ray_client.is_connected():
        raise OptionError(
            "expected a process in the Ray cluster, found a Ray client: run the script as a job of the cluster"
        )
    if not ray.is_initialized():
        ray.init()
    resources = [
        _resources_of_process(opened_bundle, options, rank, cpus_per_process, gpus_per_process, memory_per_process)
        for rank in sorted(set(options.rank_of_stage))
    ]
    limit = value_limit(opened_bundle, limits)
    launcher = RayLauncher(opened_bundle, options, resources)
    return DistributedPipeline(opened_bundle, launcher, types, process_options, limit)


def _resources_of_process(
    bundle: Bundle, options: GroupOptions, rank: int, cpus: float, gpus: float, memory: int | None
) -> dict[str, float]:
    """What Ray reserves for a process, without the resources of which it needs none."""
    stage_devices = place_stages(bundle.entry_point, options.load.devices)
    used_devices = {stage_devices[number] for number, owner in enumerate(options.rank_of_stage) if owner == rank}
    if memory is None:
        memory = estimate_memory(
            bundle, options.rank_of_stage, rank, devices=options.load.devices, in_flight=options.processes.in_flight
        ).total
    needs_gpu = any(device.partition(":")[0] != "cpu" for device in used_devices)
    resources = {"CPU": cpus, "GPU": gpus if needs_gpu else 0.0, "memory": float(memory)}
    return {name: amount for name, amount in resources.items() if amount or name == "CPU"}


def _actor_end(error: RayError) -> ProcessEnd:
    """How an actor has died, by Ray's error. Its last line has the reason."""
    text = str(error).strip().rpartition("\n")[2].rpartition("Worker exit detail: ")[2]
    exit_code = _EXIT_CODE.search(text) if isinstance(error, RayActorError) else None
    return ProcessEnd(reason=f"its actor died: {text}", exit_status=int(exit_code[1]) if exit_code else None)


def _resources_text(resources: Sequence[dict[str, float]]) -> str:
    """What several processes need together."""
    return ", ".join(
        f"{_amount_text(name, sum(of_process.get(name, 0.0) for of_process in resources))}"
        for name in ("CPU", "GPU", "memory")
        if any(name in of_process for of_process in resources)
    )


def _free_text() -> str:
    free = ray.available_resources()
    return ", ".join(_amount_text(name, free.get(name, 0.0)) for name in ("CPU", "GPU", "memory"))


def _amount_text(resource_name: str, amount: float) -> str:
    return f"{amount / 1e9:.1f} GB of memory" if resource_name == "memory" else f"{amount:g} {resource_name}"
