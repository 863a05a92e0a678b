"""The objects of a deployment: a LeaderWorkerSet, a Service for its leader, a NetworkPolicy, and a PodDisruptionBudget.

Sources: the API of LeaderWorkerSet, https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/, and of Kubernetes,
https://kubernetes.io/docs/reference/kubernetes-api/.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from stagepack.format.reader import Bundle
from stagepack.remote.url import split_entry_point
from stagepack_serving.kubernetes.deployment_options import DeploymentOptions, PodSize

_MEBIBYTE = 2**20
_ROUNDED_TO = 64 * _MEBIBYTE
HTTP_PORT = 8000
GRPC_PORT = 8001
# The port of torchrun. Between the processes, gloo listens at free ports.
TORCHRUN_PORT = 29500
RESERVED_PORTS = (HTTP_PORT, GRPC_PORT, TORCHRUN_PORT)
_TMP_MOUNT = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108 - of the container
_CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
_NAME_LABEL = "leaderworkerset.sigs.k8s.io/name"
_WORKER_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
# How long the pods wait for each other: nodes may have to be started, and images to be pulled.
_RENDEZVOUS_SECONDS = 900
_PROBE_SECONDS = 5
_START_SECONDS = 120
_SLOWEST_READING = 50_000_000  # bytes a second
# What torchrun and then Kubernetes wait for longer than the server needs to stop.
_SPARE_SECONDS = 10
# The group that files of Secrets belong to, so that the user of the container can read them and others cannot.
_SECRET_GROUP = 10001
_SECRETS_FOLDER = PurePosixPath("/etc/stagepack")
# Of the container that downloads the bundle: Python with its packages, and eight chunks of 16 MiB.
_DOWNLOAD_BYTES = 512 * _MEBIBYTE
# Texts that YAML 1.1 and 1.2 read as themselves without quotes. All others are quoted as in JSON, which YAML reads.
_PLAIN_TEXT = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_OTHER_MEANINGS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})


def memory_quantity(byte_count: int) -> str:
    """Return a number of bytes, rounded up to 64 MiB: ``"1088Mi"``."""
    return f"{-(-byte_count // _ROUNDED_TO) * _ROUNDED_TO // _MEBIBYTE}Mi"


def deployment_objects(
    bundle: Bundle, options: DeploymentOptions, pod_sizes: Sequence[PodSize]
) -> tuple[dict[str, Any], ...]:
    """Return the objects of a deployment, as the data that Kubernetes reads."""
    objects = [_worker_set(bundle, options, pod_sizes), _service(bundle, options), _network_policy(options)]
    if options.replicas > 1:
        objects.append(_disruption_budget(options))
    return tuple(objects)


def _metadata(options: DeploymentOptions, suffix: str = "") -> dict[str, Any]:
    namespace = {} if options.namespace is None else {"namespace": options.namespace}
    labels = {"app.kubernetes.io/name": options.name, "app.kubernetes.io/managed-by": "stagepack"}
    return {"name": options.name + suffix, **namespace, "labels": labels}


def entry_command(options: DeploymentOptions) -> list[str]:
    """Return the command of each container. Kubernetes replaces ``$(NAME)`` by the variables of LeaderWorkerSet."""
    tls_folder = _SECRETS_FOLDER / "tls"
    devices: list[str] = []
    if options.gpu_resource is not None:
        devices = ["cuda"]
        if options.processes_per_pod > 1:  # the first process of each pod uses its first GPU
            devices = [f"cuda:{rank % options.processes_per_pod}" for rank in range(options.process_count)]
    return [
        "torchrun",
        *("--nnodes", "$(LWS_GROUP_SIZE)", "--nproc-per-node", str(options.processes_per_pod)),
        *("--node-rank", "$(LWS_WORKER_INDEX)", "--master-addr", "$(LWS_LEADER_ADDRESS)"),
        *("--master-port", str(TORCHRUN_PORT), "--rdzv-conf", f"timeout={_RENDEZVOUS_SECONDS}"),
        *("-m", "stagepack", "serve", _literal(f"{options.name}={options.bundle_path}")),
        *("--host", "0.0.0.0", "--http-port", str(HTTP_PORT), "--grpc-port", str(GRPC_PORT)),  # noqa: S104 - the pod's
        *([] if options.operator_port is None else ["--operator-port", str(options.operator_port)]),
        *("--digest", options.digest),
        # The files of Secrets need not be there in pods that run stages alone.
        *([] if options.token_secret is None else ["--token-file", str(_SECRETS_FOLDER / "token" / "tokens")]),
        *([] if options.tls_secret is None else ["--tls-certificate", f"{tls_folder}/tls.crt"]),
        *([] if options.tls_secret is None else ["--tls-key", f"{tls_folder}/tls.key"]),
        *(argument for device in devices for argument in ("--device", device)),
        *("--max-batch", str(options.max_batch_size), "--max-sequences", str(options.max_sequences)),
        *("--linger-s", f"{options.linger:g}", "--drain-s", f"{options.drain:g}"),
        *(argument for namespace in options.allow_ops for argument in ("--allow-ops", _literal(namespace))),
        *(argument for module_name in options.imports for argument in ("--import", _literal(module_name))),
        *map(_literal, options.serve_arguments),
    ]


def _secret_volumes(options: DeploymentOptions) -> list[dict[str, Any]]:
    secrets = {"token": options.token_secret, "tls": options.tls_secret}
    return [
        {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}
        for name, secret in secrets.items()
        if secret is not None
    ]


def _literal(argument: str) -> str:
    """An argument in which Kubernetes replaces nothing: it takes ``$$`` for ``$``, and ``$(NAME)`` for a variable."""
    return argument.replace("$", "$$")


def _worker_set(bundle: Bundle, options: DeploymentOptions, pod_sizes: Sequence[PodSize]) -> dict[str, Any]:
    leader, *workers = pod_sizes
    worker_memory = max((worker.memory for worker in workers), default=leader.memory)
    secret_volumes = _secret_volumes(options)
    leader_container = _container(options, leader.memory)
    ports = _client_ports(options) | {"torchrun": TORCHRUN_PORT}
    leader_container |= {
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        **_probes(bundle, options),
    }
    leader_container["volumeMounts"] += [
        {"name": volume["name"], "mountPath": str(_SECRETS_FOLDER / volume["name"]), "readOnly": True}
        for volume in secret_volumes
    ]
    leader_template = _pod_template(bundle, options, leader_container)
    leader_template["metadata"]["annotations"] = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(HTTP_PORT if options.operator_port is None else options.operator_port),
        "prometheus.io/path": "/metrics",
        "prometheus.io/scheme": _scheme(options).lower(),
    }
    if secret_volumes:
        leader_template["spec"]["securityContext"]["fsGroup"] = _SECRET_GROUP
        leader_template["spec"]["volumes"] += secret_volumes
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _metadata(options),
        "spec": {
            "replicas": options.replicas,
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {
                    "maxSurge": options.max_surge,
                    "maxUnavailable": 0 if options.max_surge else 1,
                },
            },
            "leaderWorkerTemplate": {
                "size": options.pods,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": leader_template,
                "workerTemplate": _pod_template(bundle, options, _container(options, worker_memory)),
            },
        },
    }


def _pod_template(bundle: Bundle, options: DeploymentOptions, container: dict[str, Any]) -> dict[str, Any]:
    placement: dict[str, Any] = {}
    if options.image_pull_secrets:
        placement["imagePullSecrets"] = [{"name": secret} for secret in options.image_pull_secrets]
    if options.service_account is not None:
        placement["serviceAccountName"] = options.service_account
    if options.node_selector:
        placement["nodeSelector"] = dict(options.node_selector)
    if options.url is not None:
        placement["initContainers"] = [_download_container(bundle, options)]
    return {
        "metadata": {"labels": {"app.kubernetes.io/name": options.name}},
        "spec": {
            "automountServiceAccountToken": False,
            **placement,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "terminationGracePeriodSeconds": _shutdown_seconds(options) + _SPARE_SECONDS,
            "containers": [container],
            "volumes": [*_bundle_volumes(options), {"name": "tmp", "emptyDir": {}}],
        },
    }


def _download_container(bundle: Bundle, options: DeploymentOptions) -> dict[str, Any]:
    """It may start again and again: what is there already, undamaged, is not downloaded."""
    path, _ = split_entry_point(options.bundle_path)
    folder = str(PurePosixPath(path).parent)
    memory = memory_quantity(_DOWNLOAD_BYTES)
    disk = memory_quantity(sum(file.size for file in bundle.files.values()) + _ROUNDED_TO)
    container: dict[str, Any] = {
        "name": "pull",
        "image": options.image,
        "command": [
            *("stagepack", "pull", _literal(options.url or ""), "--out", _literal(str(path))),
            *("--digest", options.digest, "--overwrite"),
        ],
        "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108 - of the container: libraries write there
        "resources": {
            "requests": {"cpu": "1", "memory": memory, "ephemeral-storage": disk},
            "limits": {"memory": memory},
        },
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [{"name": "bundle", "mountPath": folder}, _TMP_MOUNT],
    }
    if options.url_secret is not None:
        container["envFrom"] = [{"secretRef": {"name": options.url_secret}}]
    return container


def _container(options: DeploymentOptions, memory: int) -> dict[str, Any]:
    quantity = memory_quantity(memory)
    gpus = {} if options.gpu_resource is None else {options.gpu_resource: str(options.processes_per_pod)}
    bundle_mounts = [
        {"name": volume["name"], "mountPath": str(PurePosixPath(options.bundle_path).parent), "readOnly": True}
        for volume in _bundle_volumes(options)
    ]
    return {
        "name": "stagepack",
        "image": options.image,
        "command": entry_command(options),
        "env": [
            {"name": "OMP_NUM_THREADS", "value": str(options.cpus)},
            {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(_shutdown_seconds(options))},
        ],
        "resources": {
            "requests": {"cpu": str(options.cpus * options.processes_per_pod), "memory": quantity, **gpus},
            "limits": {"memory": quantity, **gpus},
        },
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [*bundle_mounts, _TMP_MOUNT],
    }


def _shutdown_seconds(options: DeploymentOptions) -> int:
    """How long torchrun waits for a process that was told to stop; the server lingers and drains meanwhile."""
    return int(options.linger + options.drain) + _SPARE_SECONDS


def _bundle_volumes(options: DeploymentOptions) -> list[dict[str, Any]]:
    if options.url is not None:
        return [{"name": "bundle", "emptyDir": {}}]
    if options.volume is None:
        return []
    source = options.volume.source
    sources: dict[str, dict[str, Any]] = {
        "claim": {"persistentVolumeClaim": {"claimName": source, "readOnly": True}},
        "host": {"hostPath": {"path": source, "type": "Directory"}},
        "image": {"image": {"reference": source}},
    }
    return [{"name": "bundle", **sources[options.volume.kind]}]


def _client_ports(options: DeploymentOptions) -> dict[str, int]:
    """The ports of the server that others than its group may connect to."""
    operator = {} if options.operator_port is None else {"operator": options.operator_port}
    return {"http": HTTP_PORT, "grpc": GRPC_PORT, **operator}


def _scheme(options: DeploymentOptions) -> str:
    """That of health and metrics; the operator's port has no TLS."""
    return "HTTP" if options.tls_secret is None or options.operator_port is not None else "HTTPS"


def _probes(bundle: Bundle, options: DeploymentOptions) -> dict[str, Any]:
    """The server listens when all processes have loaded their stages and run the example."""
    weight_bytes = sum(stage.weight_bytes for stage in bundle.stages)
    start_seconds = _RENDEZVOUS_SECONDS + _START_SECONDS + weight_bytes // _SLOWEST_READING
    server = {"port": "http" if options.operator_port is None else "operator", "scheme": _scheme(options)}
    is_live = {"httpGet": {"path": "/v2/health/live", **server}}
    is_ready = {"httpGet": {"path": "/v2/health/ready", **server}}
    return {
        "startupProbe": {
            **is_live,
            "periodSeconds": _PROBE_SECONDS,
            "failureThreshold": -(-start_seconds // _PROBE_SECONDS),
        },
        "livenessProbe": {**is_live, "periodSeconds": 10, "timeoutSeconds": 5},
        "readinessProbe": {**is_ready, "periodSeconds": 2, "timeoutSeconds": 5},
    }


def _service(bundle: Bundle, options: DeploymentOptions) -> dict[str, Any]:
    # LeaderWorkerSet makes a service with the name of the set, by which the pods find each other.
    spec: dict[str, Any] = {
        "selector": {_NAME_LABEL: options.name, _WORKER_INDEX_LABEL: "0"},
        "ports": [
            {"name": "http", "port": HTTP_PORT, "targetPort": "http"},
            {"name": "grpc", "port": GRPC_PORT, "targetPort": "grpc"},
        ],
    }
    # All requests of a sequence must reach the group that has its state.
    if any(stage.state for stage in bundle.stages):
        spec["sessionAffinity"] = "ClientIP"
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(options, "-leader"), "spec": spec}


def _network_policy(options: DeploymentOptions) -> dict[str, Any]:
    group = {"matchLabels": {_NAME_LABEL: options.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(options),
        "spec": {
            "podSelector": group,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": group}]},
                {"ports": [{"protocol": "TCP", "port": port} for port in _client_ports(options).values()]},
            ],
        },
    }


def _disruption_budget(options: DeploymentOptions) -> dict[str, Any]:
    """A pod that is moved to another node takes its whole group with it: one at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(options),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {_NAME_LABEL: options.name}}},
    }


def to_yaml(documents: Iterable[dict[str, Any]]) -> str:
    """Return documents of dicts, lists, printable texts, integers and booleans as YAML, none of which is empty but as a value.

    Law: a reader of YAML returns the same data.
    """
    return "---\n".join("".join(f"{line}\n" for line in _mapping_lines(document)) for document in documents)


def _mapping_lines(mapping: dict[str, Any]) -> Iterator[str]:
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            yield f"{_scalar(key)}:"
            yield from (f"  {line}" for line in _mapping_lines(value))
        elif isinstance(value, list) and value:
            yield f"{_scalar(key)}:"
            yield from (f"  {line}" for line in _list_lines(value))
        else:
            yield f"{_scalar(key)}: {_scalar(value)}"


def _list_lines(items: list[Any]) -> Iterator[str]:
    for item in items:
        if isinstance(item, dict) and item:
            first_line, *further_lines = _mapping_lines(item)
            yield f"- {first_line}"
            yield from (f"  {line}" for line in further_lines)
        else:
            yield f"- {_scalar(item)}"


def _scalar(value: Any) -> str:
    """A text, an integer, a boolean, or an empty dict or list."""
    if isinstance(value, str) and _PLAIN_TEXT.fullmatch(value) and value.lower() not in _OTHER_MEANINGS:
        return value
    return json.dumps(value, ensure_ascii=False)
