"""`stagepack k8s`."""

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, get_args

import click

from stagepack.cli.command import ByteSize, argument, click_parameters, flag, option_object, subcommand
from stagepack.cli.failures import fail
from stagepack.cli.output import count_of, format_bytes, print_json, print_line, print_table, printable
from stagepack.cli.serve_options import MAX_SEQUENCES, ServeOptions
from stagepack.cli.shared_flags import (
    ALLOW_OPS_MEANING,
    JSON,
    OVERWRITE,
    Amount,
    BundleOptions,
    Count,
    default_model_name,
    folder_name,
    limit_flag,
    open_argument,
)
from stagepack.format.output_file import check_output_file, output_file
from stagepack.format.reader import Bundle
from stagepack.remote.url import is_url, split_entry_point, without_secrets
from stagepack_serving.kubernetes.deployment_options import BundleVolume, DeploymentOptions
from stagepack_serving.kubernetes.objects import RESERVED_PORTS, memory_quantity, to_yaml
from stagepack_serving.server.limits import ServerLimits

if TYPE_CHECKING:
    from stagepack_serving.kubernetes.deployment_options import PodSize

# A name of a service, RFC 1035, short enough for the suffixes of its pods.
_NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]{0,46}[a-z0-9])?")
# A name of a Secret and of most other objects, RFC 1123.
_OBJECT_NAME_PATTERN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_VALUE_PATTERN = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY_PATTERN = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
# Of an image, and of a resource of Kubernetes: https://kubernetes.io/docs/concepts/containers/images/.
_IMAGE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]*")
_MODELS_FOLDER = PurePosixPath("/models")
# Options of `stagepack serve` that depend on the pods, those for files that the pods do not have, where the probes have no certificate, and
# those that do not go with torchrun.
_DEPLOYMENT_OPTIONS = {"--host", "--http-port", "--grpc-port", "--device", "--processes"} | {
    *("--tls-certificate", "--tls-key", "--tls-client-ca", "--token-file"),
    *("--model-repository", "--model-control", "--load-model", "--poll-s", "--version-policy", "--device-memory"),
}
# Of these, every machine says the same; a runtime may be one that only the pods have.
_CHECKED_TYPES = (click.Choice, click.IntRange, click.FloatRange, ByteSize)
_DEFAULT_LIMITS = ServerLimits()
_VOLUME_KINDS = get_args(BundleVolume.__annotations__["kind"])


class _VolumeType(click.ParamType):  # type: ignore[type-arg]
    """A volume as KIND:SOURCE."""

    name = "volume"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> BundleVolume:
        """Return the volume."""
        kind, _, source = value.partition(":")
        if kind not in _VOLUME_KINDS or not source:
            self.fail(f"expected claim:NAME, host:FOLDER or image:REFERENCE, found {value!r}.", param, ctx)
        if kind == "host" and not PurePosixPath(source).is_absolute():
            self.fail(f"expected an absolute path of a folder, found {source!r}.", param, ctx)
        pattern = {"claim": _OBJECT_NAME_PATTERN, "image": _IMAGE_PATTERN}.get(kind)
        if pattern is not None and not pattern.fullmatch(source):
            self.fail(f"expected {kind}: and what names it in Kubernetes, found {value!r}.", param, ctx)
        return BundleVolume(kind=kind, source=source)


class _Label(click.ParamType[tuple[str, str]]):
    """A label as KEY=VALUE."""

    name = "label"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Return the key and the value."""
        key, equals, label_value = value.partition("=")
        if not equals or not _LABEL_KEY_PATTERN.fullmatch(key) or not _LABEL_VALUE_PATTERN.fullmatch(label_value):
            self.fail(f"expected a label KEY=VALUE of Kubernetes, found {value!r}.", param, ctx)
        return key, label_value


def _matching(pattern: re.Pattern[str], expected: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that refuses other texts than those of a pattern."""

    def check(_context: click.Context, _option: click.Parameter, value: Any) -> Any:
        for text in value if isinstance(value, tuple) else [value]:
            if text is not None and not pattern.fullmatch(text):
                raise click.BadParameter(f"expected {expected}, found {text!r}.")
        return value

    return check


_check_object_name = _matching(_OBJECT_NAME_PATTERN, "the name of an object of Kubernetes")
_check_image = _matching(_IMAGE_PATTERN, "a container image such as a/b:1")
_check_resource = _matching(_LABEL_KEY_PATTERN, "a resource such as nvidia.com/gpu")


def _check_printable(_context: click.Context, _option: click.Parameter, value: Any) -> Any:
    """Refuse control characters, which YAML does not hold."""
    texts = value if isinstance(value, tuple) else [getattr(value, "source", value)]
    if not all(text is None or text.isprintable() for text in texts):
        raise click.BadParameter("control characters are not allowed.")
    return value


def _check_serve_arguments(
    context: click.Context, parameter: click.Parameter, arguments: tuple[str, ...]
) -> tuple[str, ...]:
    """Refuse what `stagepack serve` would refuse in the pods, and what the deployment says already."""
    serve = click.Command("serve", params=[*click_parameters(ServeOptions)])
    known_options = {name for option in serve.params for name in (*option.opts, *option.secondary_opts)}
    own_options = {name for option in context.command.params for name in option.opts} | _DEPLOYMENT_OPTIONS
    own_options -= {"--overwrite"}  # there it is about the file of --trace
    if arguments and not arguments[0].startswith("-"):
        raise click.BadParameter(f"unexpected argument {arguments[0]!r}: options of stagepack serve come after --.")
    for word in arguments:
        option_name = word.partition("=")[0]
        if option_name.startswith("-") and option_name not in known_options - own_options:
            raise click.BadParameter(
                f"{option_name} is not an option of stagepack serve that a deployment leaves open."
            )
    serve_context = click.Context(serve, parent=context)  # with its names of --help
    texts, _, _ = serve.make_parser(serve_context).parse_args(list(arguments))
    for option in serve.params:
        if isinstance(option.type, _CHECKED_TYPES) and option.name in texts:
            option.type_cast_value(serve_context, texts[option.name])
    bundles = texts.get("bundle_arguments")  # no tuple if there are none
    if isinstance(bundles, tuple) and bundles:
        raise click.BadParameter(f"unexpected argument {bundles[0]!r}: the deployment serves its own bundle.")
    _check_printable(context, parameter, arguments)
    return arguments


@option_object
class _Options(BundleOptions):
    out: Path = flag("-o, --out FILE", "YAML file to write.", required=True)
    name: str | None = flag(
        "--name NAME",
        "Name of the LeaderWorkerSet, and by which clients call the model.",
        default_text="name of the bundle's folder without .stagepack",
    )
    namespace: str | None = flag(
        "--namespace NAME",
        "Namespace of all objects.",
        default_text="that of whoever applies them",
        callback=_check_object_name,
    )
    image: str = flag(
        "--image REFERENCE",
        "Container image with stagepack, PyTorch and the extra serve, such as one built from the Dockerfile of the project and pushed to a "
        "registry of yours. Name a version, or a digest.",
        required=True,
        callback=_check_image,
    )
    image_pull_secrets: tuple[str, ...] = flag(
        "--image-pull-secret NAME",
        "Secret with the credentials of the registry of the image. Repeatable.",
        default_text="none",
        callback=_check_object_name,
    )
    service_account: str | None = flag(
        "--service-account NAME",
        "Service account of the pods, such as one that may read the store of the bundle. Its token is not mounted.",
        default_text="that of the namespace",
        callback=_check_object_name,
    )
    node_selector: tuple[tuple[str, str], ...] = flag(
        "--node-selector KEY=VALUE",
        "Run the pods on nodes with this label only. Repeatable.",
        default_text="any node",
        type=_Label(),
        multiple=True,
    )
    token_secret: str | None = flag(
        "--token-secret NAME",
        "Secret whose key 'tokens' has the tokens of clients, as --token-file of stagepack serve reads them.",
        default_text="requests need no token",
        callback=_check_object_name,
    )
    tls_secret: str | None = flag(
        "--tls-secret NAME",
        "Secret of the type kubernetes.io/tls with the certificate and the key of the server. The probes ask it by HTTPS.",
        default_text="no TLS",
        callback=_check_object_name,
    )
    url_secret: str | None = flag(
        "--url-secret NAME",
        "For a BUNDLE at a URL: Secret whose keys are environment variables of the container that downloads it, such as credentials.",
        default_text="none",
        callback=_check_object_name,
    )
    volume: BundleVolume | None = flag(
        "--volume KIND:SOURCE",
        "Volume with the folder of the bundle: claim:NAME of a persistent volume, host:FOLDER of each node, or image:REFERENCE.",
        default_text="the image has the bundle; of a BUNDLE at a URL, each pod downloads it",
        type=_VolumeType(),
        callback=_check_printable,
    )
    path_in_pod: str | None = flag(
        "--path PATH",
        "Path of the bundle in the containers. The volume is mounted at its parent folder.",
        default_text=f"{_MODELS_FOLDER}/ and the name of the bundle's folder",
        callback=_check_printable,
    )
    replicas: int = flag("--replicas N", "Number of groups of pods.", type=click.IntRange(0), default=1)
    max_surge: int = flag(
        "--max-surge N",
        "Number of further groups while groups are replaced; with 0, each is stopped before the next one starts.",
        type=click.IntRange(0),
        default=1,
    )
    pods: int | None = flag(
        "--pods N",
        "Number of pods of a group.",
        default_text="as many as make a process for each stage",
        type=click.IntRange(1),
    )
    processes_per_pod: int = flag(
        "--processes-per-pod N",
        "Number of processes of each pod. All processes of a group run at least one stage.",
        type=click.IntRange(1),
        default=1,
    )
    cpus: int = flag("--cpus N", "CPUs and threads of each process.", type=click.IntRange(1), default=2)
    gpu_resource: str | None = flag(
        "--gpu RESOURCE",
        "Run the stages on GPUs, one for each process. Without a value, RESOURCE is nvidia.com/gpu.",
        default_text="off: the stages run on the CPU",
        is_flag=False,
        flag_value="nvidia.com/gpu",
        callback=_check_resource,
    )
    pod_memory: int | None = flag(
        "--memory SIZE",
        "Memory of each pod, such as 24GiB. The estimate is for the sizes of the example and the batches of --max-batch.",
        default_text="estimated from the plan",
        type=ByteSize(),
    )
    operator_port: int | None = flag(
        "--operator-port PORT",
        "Port of the pods for health and metrics alone, without TLS and tokens: the probes and Prometheus are answered there whatever load "
        "the other ports have.",
        default_text="none: they ask the port for REST",
        type=click.IntRange(1024, 65_535),
    )
    max_batch_size: int = limit_flag(
        "--max-batch N",
        "Largest batch size that requests are combined into; 1 runs each request alone.",
        Count(),
        _DEFAULT_LIMITS.max_batch_size,
    )
    max_sequences: int = MAX_SEQUENCES
    linger: float = limit_flag(
        "--linger-s SECONDS",
        "How long new requests are still accepted after a pod was told to stop, in seconds.",
        Amount(),
        10,
    )
    drain: float = limit_flag(
        "--drain-s SECONDS",
        "How long accepted requests may still take when a pod stops, in seconds.",
        Amount(),
        _DEFAULT_LIMITS.drain,
    )
    allow_ops: tuple[str, ...] = flag(
        "--allow-ops NAME", ALLOW_OPS_MEANING, default_text="none", callback=_check_printable
    )
    imports: tuple[str, ...] = flag(
        "--import MODULE",
        "Python module that the processes in the pods import first. Repeatable.",
        default_text="none",
        callback=_check_printable,
    )
    overwrite: bool = OVERWRITE
    as_json: bool = JSON
    serve_arguments: tuple[str, ...] = argument(
        "[-- SERVE_OPTIONS]", type=click.UNPROCESSED, callback=_check_serve_arguments
    )


@subcommand(
    "k8s",
    examples=[
        "stagepack k8s net.stagepack -o net.yaml --image a/b:1 --volume claim:data",
        "stagepack k8s net.stagepack -o net.yaml --image a/b:1 --pods 2 --gpu",
        "stagepack k8s s3://models/net -o - --image a/b:1 | kubectl apply -f -",
    ],
)
def command(options: _Options) -> None:
    """Write a deployment on Kubernetes.

    Writes a LeaderWorkerSet, whose pods run the stages under torchrun, a Service for the pod that has the server, a NetworkPolicy that
    keeps other pods away from the processes, and for several groups a PodDisruptionBudget. Memory is sized from the plan of the bundle. The
    server must find a bundle of the same digest. Needs no torch and no cluster.

    SERVE_OPTIONS are further options of ``stagepack serve`` in the pods, such as ``-- --runtime onnxruntime --deadline-s 20``.
    """
    check_output_file(options.out, overwrite=options.overwrite)
    bundle = open_argument(options.bundle_path)
    deployment = _deployment_options(bundle, options)
    from stagepack_serving.kubernetes.deployment_options import size_pods  # noqa: PLC0415 - the same
    from stagepack_serving.kubernetes.objects import deployment_objects  # noqa: PLC0415 - after the arguments are checked

    pod_sizes = size_pods(bundle, deployment)
    text = _header(bundle, deployment, pod_sizes) + to_yaml(deployment_objects(bundle, deployment, pod_sizes))
    with output_file(options.out) as path:
        path.write_text(text, encoding="utf-8")
    _print_facts(options, deployment, pod_sizes)


def _deployment_options(bundle: Bundle, options: _Options) -> DeploymentOptions:
    stage_count = len(bundle.stages)
    pods = options.pods or max(1, stage_count // options.processes_per_pod)
    if pods * options.processes_per_pod > stage_count:
        fail(
            f"expected at most as many processes as stages, {stage_count}, found {pods * options.processes_per_pod}: "
            "choose fewer --pods or --processes-per-pod"
        )
    model_name = default_model_name(bundle.location)
    deployment_name = options.name or re.sub(r"[^a-z0-9]+", "-", model_name.lower()).strip("-")
    if not _NAME_PATTERN.fullmatch(deployment_name):
        fail(
            "--name: expected at most 48 lowercase letters, digits and hyphens, a letter first and no hyphen last, found "
            f"{deployment_name!r}"
        )
    path_in_pod = PurePosixPath(options.path_in_pod or _MODELS_FOLDER / folder_name(bundle.location))
    if not path_in_pod.is_absolute() or path_in_pod.parent == PurePosixPath("/"):
        fail(f"--path: expected an absolute path in a folder such as {_MODELS_FOLDER}, found {str(path_in_pod)!r}")
    if ".." in path_in_pod.parts or ":" in (folder := str(path_in_pod.parent)) or folder == "/tmp":  # noqa: S108 - of the pod
        fail(
            f"--path: expected no '..', no ':' and another folder than /tmp, a volume of its own, found {str(path_in_pod)!r}"
        )
    if options.pod_memory == 0:  # no limit to Kubernetes
        fail("--memory: expected more than 0 bytes, found 0")
    if options.operator_port in RESERVED_PORTS:
        fail(f"--operator-port: expected another port than {', '.join(map(str, RESERVED_PORTS))}, which the pods use")
    label_keys = [key for key, _ in options.node_selector]
    if len(set(label_keys)) < len(label_keys):
        fail(f"--node-selector: expected each key once, found {', '.join(label_keys)}")
    taken_over = {
        field.name: getattr(options, field.name) for field in fields(DeploymentOptions) if hasattr(options, field.name)
    }
    url = None
    if options.volume is None and is_url(options.bundle_path):
        url = str(split_entry_point(options.bundle_path)[0])
        if without_secrets(url) != url:
            fail(
                "the URL has a secret, which everybody reads who sees the file: leave it out, and give credentials by --url-secret"
            )
    elif options.url_secret is not None:
        raise click.UsageError("--url-secret requires a BUNDLE at a URL, and no --volume")
    bundle_path = f"{path_in_pod}{bundle.fragment}"
    found = {"name": deployment_name, "bundle_path": bundle_path, "digest": bundle.digest, "url": url, "pods": pods}
    return DeploymentOptions(**taken_over | found)


def _header(bundle: Bundle, deployment: DeploymentOptions, pod_sizes: "tuple[PodSize, ...]") -> str:
    """Comments that say where the numbers come from."""
    lines = [
        f"Written by stagepack k8s for {printable(folder_name(bundle.location))}, whose manifest has the digest {bundle.digest}.",
        f"A group has {count_of('pod', deployment.pods)}. Pod 0 has the server; the others have the memory of the largest of them:",
        *(
            f"  pod {pod_index}: {_stages_text(pod)}, {format_bytes(pod.weight_bytes)} of weights, "
            f"{memory_quantity(pod.memory)} of memory"
            for pod_index, pod in enumerate(pod_sizes)
        ),
        "torch.distributed does not authenticate: keep the NetworkPolicy, with a network plugin that enforces it.",
    ]
    return "".join(f"# {line}\n" for line in lines)


def _stages_text(pod: "PodSize") -> str:
    first_stage, last_stage = pod.stages[0], pod.stages[-1]
    return f"stage {first_stage}" if first_stage == last_stage else f"stages {first_stage} to {last_stage}"


def _print_facts(options: _Options, deployment: DeploymentOptions, pod_sizes: "tuple[PodSize, ...]") -> None:
    if options.as_json:
        pods = [
            {"stages": list(pod.stages), "weight_bytes": pod.weight_bytes, "memory": memory_quantity(pod.memory)}
            for pod in pod_sizes
        ]
        print_json({"out": str(options.out), "name": deployment.name, "path": deployment.bundle_path, "pods": pods})
        return
    rows = [
        [str(pod_index), _stages_text(pod), format_bytes(pod.weight_bytes), memory_quantity(pod.memory)]
        for pod_index, pod in enumerate(pod_sizes)
    ]
    print_table("pods of a group", ["#pod", "stages", "#weights", "#memory"], rows)
    print_line(f"wrote {options.out}: the server is at the service {deployment.name}-leader")
