"""The objects that `stagepack k8s` writes: valid against the published schemas, sized from the plan."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import stagepack
from stagepack.cli import main
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.process_memory import estimate_memory
from stagepack_serving.kubernetes.objects import to_yaml
from tests.distributed.bundles import export_counting
from tests.kubernetes.deployment import container_of, expand, templates, validator, write_deployment

OPTIONS = [
    [],
    ["--volume", "claim:models", "--replicas", "2"],
    ["--volume", "host:/srv/models", "--pods", "1"],
    ["--volume", "image:registry.example/models:1", "--path", "/bundles/it is $(here)"],
    ["--gpu", "--pods", "2"],
    ["--gpu", "amd.com/gpu", "--pods", "1", "--processes-per-pod", "3", "--memory", "24GiB"],
    ["--allow-ops", "mine", "--import", "my.operators", "--cpus", "8", "--linger-s", "0.5", "--image", "yes"],
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_objects_are_valid_by_their_published_schemas(layers: Bundle, tmp_path: Path, options: list[str]) -> None:
    objects = write_deployment(layers, tmp_path, *options)
    assert [described["kind"] for described in objects] == ["LeaderWorkerSet", "Service", "NetworkPolicy"]
    for described in objects:
        validator(described["kind"]).validate(described)


@pytest.mark.parametrize("folder", ["$(HOME)", "$$(HOME)", "price$$", "a$b$"])
def test_kubernetes_replaces_nothing_in_texts(layers: Bundle, tmp_path: Path, folder: str) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path, "--path", f"/bundles/{folder}")
    command = container_of(templates(worker_set)[0])["command"]
    expanded_command = [expand(argument, {"HOME": "/root"}) for argument in command]
    assert any(argument.endswith(f"=/bundles/{folder}") for argument in expanded_command)


def test_the_schema_finds_what_is_wrong(layers: Bundle, tmp_path: Path) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path)

    def change(path: str, value: Any) -> dict[str, Any]:
        changed = copy.deepcopy(worker_set)
        *parents, last = path.split("/")
        place: Any = changed["spec"]["leaderWorkerTemplate"]
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        place[last] = value
        return changed

    for path, value in [
        ("size", "3"),
        ("restartPolicy", "Always"),
        ("leaderTemplate/spec/containers/0/comand", ["torchrun"]),
        ("workerTemplate/spec/containers/0/env/0/value", 2),
        ("workerTemplate/spec/volumes/0/emptyDir", []),
    ]:
        with pytest.raises(jsonschema.ValidationError):
            validator("LeaderWorkerSet").validate(change(path, value))


def test_memory_is_that_of_the_plan(layers: Bundle, tmp_path: Path) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path, "--max-batch", "4096")
    leader, worker = map(container_of, templates(worker_set))
    assert worker_set["spec"]["leaderWorkerTemplate"]["size"] == 3
    (symbol,) = layers.entry_point.symbols
    needed = [estimate_memory(layers, (0, 1, 2), rank, sizes={symbol.name: 4096}).total for rank in range(3)]
    for container, byte_count in ((leader, needed[0] + 768 * 2**20), (worker, max(needed[1:]) + 256 * 2**20)):
        memory = container["resources"]["limits"]["memory"]
        assert memory == container["resources"]["requests"]["memory"]
        assert byte_count <= int(memory.removesuffix("Mi")) * 2**20 < byte_count + 64 * 2**20

    facts = json.loads(
        CliRunner()
        .invoke(main, ["k8s", str(layers.path), "-o", str(tmp_path / "x.yaml"), "--memory", "2GiB", "--json"])
        .stdout
    )
    assert [(pod["stages"], pod["memory"]) for pod in facts["pods"]] == [
        ([0], "2048Mi"),
        ([1], "2048Mi"),
        ([2], "2048Mi"),
    ]


def test_gpus_and_their_processes(layers: Bundle, tmp_path: Path) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path, "--gpu", "--pods", "1", "--processes-per-pod", "3")
    leader, _ = map(container_of, templates(worker_set))
    assert leader["resources"]["limits"]["nvidia.com/gpu"] == "3"
    command = " ".join(leader["command"])
    assert "--nproc-per-node 3 " in command
    assert "--device cuda:0 --device cuda:1 --device cuda:2" in command
    worker_set, _, _ = write_deployment(layers, tmp_path, "--gpu")
    assert "--device cuda --max-batch" in " ".join(container_of(templates(worker_set)[1])["command"])


def test_further_options_of_the_server(layers: Bundle, tmp_path: Path) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path, "--", "--runtime", "onnxruntime", "--deadline-s=20")
    for template in templates(worker_set):
        assert container_of(template)["command"][-3:] == ["--runtime", "onnxruntime", "--deadline-s=20"]
    for refused in ("--processes", "--no-such-option", "--max-batch", "--tls-key"):
        arguments = ["k8s", str(layers.path), "-o", str(tmp_path / "x.yaml"), "--", refused, "2"]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert f"{refused} is not an option of stagepack serve that a deployment leaves open" in result.stderr
    for further, message in (
        (["--log-level", "loud"], "'loud' is not one of"),
        (["--access-log", "other.stagepack"], "unexpected argument 'other.stagepack'"),
        (["--max-queue"], "'--max-queue' requires an argument"),
        (["--model-control", "poll"], "--model-control is not an option"),
    ):
        result = CliRunner().invoke(main, ["k8s", str(layers.path), "-o", str(tmp_path / "x.yaml"), "--", *further])
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    result = CliRunner().invoke(main, ["k8s", str(layers.path), "other.stagepack", "-o", str(tmp_path / "x.yaml")])
    assert (result.exit_code, "unexpected argument 'other.stagepack'" in result.stderr) == (2, True)


def test_a_pod_that_is_restarted_may_replace_its_trace(layers: Bundle, tmp_path: Path) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path, "--", "--trace", "/traces/run.json", "--overwrite")
    for template in templates(worker_set):
        assert container_of(template)["command"][-3:] == ["--trace", "/traces/run.json", "--overwrite"]


def test_only_the_leader_is_asked_and_only_the_group_connects(layers: Bundle, tmp_path: Path) -> None:
    worker_set, service, policy = write_deployment(layers, tmp_path, "--name", "net")
    leader, worker = map(container_of, templates(worker_set))
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(leader)
    assert not {"startupProbe", "livenessProbe", "readinessProbe", "ports"} & set(worker)
    assert (
        service["metadata"]["name"] != worker_set["metadata"]["name"]
    )  # which LeaderWorkerSet uses for a service of its own
    assert service["spec"]["selector"] == {
        "leaderworkerset.sigs.k8s.io/name": "net",
        "leaderworkerset.sigs.k8s.io/worker-index": "0",
    }
    among_pods, from_clients = policy["spec"]["ingress"]
    assert among_pods["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    assert [port["port"] for port in from_clients["ports"]] == [8000, 8001]


def test_it_has_time_to_stop(layers: Bundle, tmp_path: Path) -> None:
    worker_set, _, _ = write_deployment(layers, tmp_path, "--linger-s", "20", "--drain-s", "100")
    for template in templates(worker_set):
        (torchrun_seconds,) = (
            int(variable["value"])
            for variable in container_of(template)["env"]
            if variable["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        )
        assert 120 < torchrun_seconds < template["spec"]["terminationGracePeriodSeconds"]


def test_sequences_stay_with_the_group_that_has_their_state(layers: Bundle, tmp_path: Path) -> None:
    _, with_state, _ = write_deployment(export_counting(tmp_path), tmp_path)
    _, without_state, _ = write_deployment(layers, tmp_path)
    assert with_state["spec"]["sessionAffinity"] == "ClientIP"
    assert "sessionAffinity" not in without_state["spec"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--pods", "4"],
            "expected at most as many processes as stages, 3, found 4: choose fewer --pods or --processes-per-pod",
        ),
        (["--processes-per-pod", "4"], "expected at most as many processes as stages, 3, found 4"),
        (["--name", "Net"], "--name: expected at most 48 lowercase letters"),
        (["--path", "models/m"], "--path: expected an absolute path in a folder such as /models, found 'models/m'"),
        (["--path", "/m"], "--path: expected an absolute path in a folder"),
    ],
)
def test_what_cannot_be_deployed_is_one_line(layers: Bundle, tmp_path: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["k8s", str(layers.path), "-o", str(tmp_path / "x.yaml"), *options])
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "x.yaml").exists()


def test_a_file_is_not_replaced_by_mistake(layers: Bundle, tmp_path: Path) -> None:
    out = tmp_path / "x.yaml"
    out.write_text("mine")
    result = CliRunner().invoke(main, ["k8s", str(layers.path), "-o", str(out)])
    assert result.exit_code == 1
    assert "x.yaml: already exists: choose another name, or replace the file (--overwrite)" in result.stderr
    assert out.read_text() == "mine"


PRINTABLE_TEXTS = st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" "), max_size=6)
DATA = st.recursive(
    PRINTABLE_TEXTS | st.integers() | st.booleans(),
    lambda inner: (
        st.lists(st.dictionaries(PRINTABLE_TEXTS, inner, max_size=3) | PRINTABLE_TEXTS, max_size=3)
        | st.dictionaries(PRINTABLE_TEXTS, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(PRINTABLE_TEXTS, DATA, min_size=1, max_size=3), min_size=1, max_size=3))
def test_yaml_is_read_as_what_was_written(documents: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(to_yaml(documents))) == documents


@pytest.mark.parametrize(
    "text", ["no", "On", "NULL", "~", "1e3", "0x1f", "12:30", "-", "- a", "a: b", "#a", "", " ", "é", "😀"]
)
def test_texts_that_look_like_something_else(text: str) -> None:
    assert yaml.safe_load(to_yaml([{text: text}])) == {text: text}


class _Functions(torch.nn.Module):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return x - 1


def test_one_of_several_entry_points_is_served(tmp_path: Path) -> None:
    inputs = stagepack.Inputs(args=(torch.ones(2),))
    bundle = stagepack.export(
        _Functions(), entry_points={"encode": inputs, "decode": inputs}, out=tmp_path / "m.stagepack"
    )
    out = tmp_path / "m.yaml"
    arguments = ["k8s", f"{bundle.path}#decode", "-o", str(out), "--volume", "claim:models"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    container = container_of(templates(next(yaml.safe_load_all(out.read_text())))[0])
    assert "m-decode=/models/m.stagepack#decode" in container["command"]
    assert container["volumeMounts"][0]["mountPath"] == "/models"
