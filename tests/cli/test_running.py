"""`load` and `verify --run`: what they run, what they compare, and what they say when it does not fit."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import stagepack
from stagepack.format.weights import TensorSpec, weight_file_header
from stagepack_loaders.example import replay_example
from tests.bundle_editor import BundleEditor, weight_file
from tests.distributed.forked_processes import forked_launches
from tests.hostile.attack import command_fails, run
from tests.modules import module_of

IDS = torch.arange(6).reshape(2, 3)


@pytest.mark.parametrize("prefix", ["", "input."])
def test_inputs_and_outputs_are_safetensors_files(prefix: str, sound: Path, tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    save_file({f"{prefix}ids": ids}, tmp_path / "in.safetensors")
    result = run(
        "load", str(sound), "--inputs", str(tmp_path / "in.safetensors"), "--outputs", str(tmp_path / "out.safetensors")
    )
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    expected = stagepack.load(sound)(ids)
    outputs = load_file(tmp_path / "out.safetensors")
    assert torch.equal(outputs["output.0"], expected["logits"])
    assert torch.equal(outputs["output.1"], expected["calls"])


@pytest.mark.parametrize("options", [["--stream"], ["--stream", "--stage", "0"], ["--device-memory", "1GiB"]])
def test_weights_that_arrive_while_stages_run(sound: Path, options: list[str]) -> None:
    result = run("load", str(sound), *options, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts.get("difference", 0) == 0
    assert ("all_weights" in facts) == ("--stream" in options)
    if "--stream" in options:
        assert "all weights after" in run("load", str(sound), *options).stdout
        assert facts["all_weights"] >= sum(facts["start"].values())


def test_streaming_excludes_a_copy(sound: Path) -> None:
    command_fails("load", str(sound), "--stream", "--copy", says="stream excludes copy")


def test_the_recorded_example_can_be_the_inputs(sound: Path, tmp_path: Path) -> None:
    example = sound / "example.safetensors"
    result = run("load", str(sound), "--inputs", str(example), "--outputs", str(tmp_path / "out.safetensors"), "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert "difference" not in facts
    assert facts["outputs"] == 2
    recorded = {key: tensor for key, tensor in load_file(example).items() if key.startswith("output.")}
    assert all(torch.equal(tensor, load_file(tmp_path / "out.safetensors")[key]) for key, tensor in recorded.items())


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, r"expected the inputs ids, found \(none\)"),
        ({"idz": IDS}, "expected the inputs ids, found idz"),
        ({"ids": IDS, "more": IDS + 1}, "expected the inputs ids, found "),
        ({"ids": IDS.float()}, "ids: expected dtype int64, found float32"),
        ({"ids": IDS[0]}, r"ids: expected 2 dimensions \[batch, 3\], found the shape \[3\]"),
        ({"ids": IDS[:, :2].contiguous()}, r"ids: dimension 1: expected 3 .*, found 2"),
        ({"ids": torch.zeros(65, 3, dtype=torch.long)}, r"ids: dimension 0: expected 1 to 64 \('batch'\), found 65"),
        ({"ids": IDS + 100}, "an input value is out of range in stage 0: index out of range"),
    ],
)
def test_inputs_that_do_not_fit_are_named(
    tensors: dict[str, torch.Tensor], says: str, sound: Path, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "in.safetensors")
    out = tmp_path / "out.safetensors"
    command_fails("load", str(sound), "--inputs", str(tmp_path / "in.safetensors"), "--outputs", str(out), says=says)
    assert not out.exists()


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"text",
        b"\xff" * 100,
        weight_file(b"[]", b""),
        weight_file(b'{"x": 1}', b""),
        weight_file(b'{"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}', b"\0"),
    ],
)
def test_inputs_that_are_no_safetensors_file_are_said_to_be_none(
    content: bytes | None, sound: Path, tmp_path: Path
) -> None:
    path = tmp_path / "in.safetensors"
    if content is not None:
        path.write_bytes(content)
    command_fails(
        "load", str(sound), "--inputs", str(path), says=r"in\.safetensors: expected a safetensors file with the inputs"
    )


def test_outputs_that_cannot_be_written_are_said(sound: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "out.safetensors", tmp_path, Path("/proc/out.safetensors")):
        command_fails("load", str(sound), "--outputs", str(path), says=str(path))


def test_outputs_of_a_type_that_the_file_cannot_hold_are_said(tmp_path: Path) -> None:
    stagepack.export(
        module_of(lambda self, x: torch.complex(x, x)),
        (torch.ones(2, dtype=torch.float64),),
        out=tmp_path / "m.stagepack",
    )
    out = tmp_path / "out.safetensors"
    command_fails("load", str(tmp_path / "m.stagepack"), "--outputs", str(out), says=r"has no dtype torch\.complex128")
    assert not out.exists()


@pytest.mark.parametrize("stage", range(3))
def test_one_stage_is_loaded_from_its_own_files(stage: int, sound: Path) -> None:
    facts = json.loads(run("load", str(sound), "--stage", str(stage), "--device", "cpu", "--json").stdout)
    (row,) = facts["stages"]
    bundle = stagepack.open(sound)
    entry = bundle.stages[stage]
    assert row["stage"] == stage
    assert row["device"] == "cpu"
    assert row["files"] == [entry.graph, *entry.weights]
    assert row["bytes_read"] == sum(bundle.files[file_name].size for file_name in row["files"])
    assert "difference" not in facts


def test_bytes_of_a_file_that_stages_share_count_once(sound: Path) -> None:
    facts = json.loads(run("load", str(sound), "--json").stdout)
    bundle = stagepack.open(sound)
    names = {file_name for stage in facts["stages"] for file_name in stage["files"]}
    assert len(names) < sum(len(stage["files"]) for stage in facts["stages"])
    assert sum(stage["bytes_read"] for stage in facts["stages"]) == sum(bundle.files[name].size for name in names)


def test_weights_are_compared_with_their_digests_unless_the_caller_says_no(editor: BundleEditor) -> None:
    editor.flip_bit("stage-1.safetensors", (editor / "stage-1.safetensors").stat().st_size - 2, bit=5)
    command_fails("load", str(editor.path), says=r"stage-1\.safetensors: the content was changed")
    for verify in ("manifest", "off"):
        result = run("load", str(editor.path), "--verify", verify, "--json")
        assert result.exit_code == 1
        assert "expected the recorded results of the example, found a difference of 0.0" in result.stderr
        facts = json.loads(result.stdout)
        assert facts["difference"] > 0
        assert facts["verify"] == verify
    assert (
        "verified: all but the content of weight files" in run("load", str(editor.path), "--verify", "manifest").stdout
    )


def without_example(editor: BundleEditor) -> None:
    """Take the example out of a bundle."""
    (editor / "example.safetensors").unlink()

    def change(fields: dict[str, Any]) -> None:
        fields["files"] = [file for file in fields["files"] if file["name"] != "example.safetensors"]
        del fields["entry_points"][0]["example"]

    editor.edit_manifest(change)


def test_a_bundle_without_an_example_is_loaded_and_not_run(editor: BundleEditor) -> None:
    without_example(editor)
    result = run("load", str(editor.path))
    assert result.exit_code == 0, result.output
    assert "example" not in result.stdout
    assert "difference" not in json.loads(run("load", str(editor.path), "--json").stdout)
    assert run("verify", str(editor.path)).exit_code == 0
    command_fails("verify", "--run", str(editor.path), says="the bundle has no example to run")
    command_fails("load", str(editor.path), "--outputs", "out.safetensors", says="has no example to run: pass --inputs")


def example(editor: BundleEditor, **tensors: torch.Tensor) -> None:
    """Change tensors of the example; ``_`` in the names of arguments stands for ``.``."""
    recorded = {
        key: tensor for key, tensor in load_file(editor / "example.safetensors").items() if not key.startswith("__")
    }
    recorded |= {argument.replace("_", "."): tensor for argument, tensor in tensors.items()}
    specs = [
        TensorSpec(name=key, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for key, tensor in recorded.items()
    ]
    header, paddings = weight_file_header(specs)
    contents = [tensor.contiguous().numpy().tobytes() for tensor in recorded.values()]
    data = b"".join(bytes(padding) + content for padding, content in zip(paddings, contents, strict=True))
    editor.write_file("example.safetensors", header + data)


def test_an_example_with_other_numbers_shows_the_difference(editor: BundleEditor) -> None:
    example(editor, output_1=torch.tensor([5.0]))
    path = str(editor.path)
    command_fails("verify", "--run", path, says="expected the recorded results of the example, found a difference of 4")
    command_fails("load", path, says="expected the recorded results of the example, found a difference of 4")
    for command in (["verify", "--run"], ["load"]):
        result = run(*command, path, "--json")
        assert result.exit_code == 1
        assert json.loads(result.stdout)["difference"] == 4.0
    assert json.loads(run("verify", "--run", path, "--json").stdout)["ok"] is False
    for arguments in (["verify", "--run", "--atol", "4"], ["load", "--atol", "4"], ["load", "--rtol", "0.8"]):
        result = run(*arguments, path, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["difference"] == 4.0


@pytest.mark.process
def test_another_answer_of_processes_is_refused(editor: BundleEditor) -> None:
    example(editor, output_1=torch.tensor([5.0]))
    with forked_launches():
        result = run("load", str(editor.path), "--processes", "2", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["difference"] == 4.0
    assert "expected the recorded results of the example, found a difference of 4" in result.stderr


@pytest.mark.parametrize("recorded", [torch.ones(1, 1), torch.ones(1, dtype=torch.int64)])
def test_example_with_results_of_another_shape_or_dtype_is_refused(
    recorded: torch.Tensor, editor: BundleEditor
) -> None:
    example(editor, output_1=recorded)
    command_fails("verify", str(editor.path), says=r"expected 'output\.1' with the dtype of its edge .*\[M16\]")
    result = run("load", str(editor.path), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout, parse_constant=pytest.fail)["difference"] is None
    assert "found a difference of inf (other shapes, dtypes or special values)" in result.stderr


@pytest.mark.parametrize("recorded", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("command", [["verify", "--run"], ["load"]])
def test_example_with_a_recorded_special_value_fails_the_check(
    recorded: float, command: list[str], editor: BundleEditor
) -> None:
    example(editor, output_1=torch.tensor([recorded]))
    says = r"found a difference of inf \(other shapes, dtypes or special values\)"
    command_fails(*command, str(editor.path), says=says)
    result = run(*command, str(editor.path), "--rtol", "1e9", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout, parse_constant=pytest.fail)["difference"] is None


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (IDS + 1000, "an input value is out of range in stage 0"),
        (IDS.float(), "ids: expected dtype int64, found float32"),
        (IDS[:, :1], "ids: dimension 1: expected 3 "),
    ],
)
def test_an_example_whose_inputs_do_not_fit_is_said(ids: torch.Tensor, says: str, editor: BundleEditor) -> None:
    example(editor, input_ids=ids)
    command_fails("load", str(editor.path), says=says)
    command_fails("verify", "--run", str(editor.path), says=rf"{says}|expected 'input\.ids' with the dtype .*\[M16\]")


def test_an_example_that_is_no_weight_file_is_refused(editor: BundleEditor) -> None:
    for content in (
        b"",
        b"text",
        weight_file(b'{"x": 1}', b""),
        weight_file(b'{"x":{"dtype":"X","shape":[],"data_offsets":[0,0]}}', b""),
    ):
        editor.write_file("example.safetensors", content)
        for command in (["verify"], ["verify", "--run"], ["load"]):
            command_fails(*command, str(editor.path), says=r"example\.safetensors: ")


def test_verify_says_in_json_which_rules_are_broken(editor: BundleEditor) -> None:
    editor.edit_graph(1, lambda fields: fields["nodes"][0].update(op=9))
    (editor / "extra").touch()
    result = run("verify", str(editor.path), "--strict", "--json")
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert facts["ok"] is False
    assert [problem["where"] for problem in facts["problems"]] == ["extra"]
    (editor / "extra").unlink()
    result = run("verify", str(editor.path), "--json")
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem["where"] == "stage-1.msgpack: node 0"
    assert problem["message"] == "op 9 is not in the table"
    assert problem["rule"] in result.stderr


def test_verify_says_how_many_files_hold_and_the_digest(sound: Path) -> None:
    result = run("verify", str(sound))
    bundle = stagepack.open(sound)
    assert result.stdout == (
        f"{sound}: verified {len(bundle.files) + 1} files and all format rules that need no torch\nsha256: {bundle.digest}\n"
    )
    assert len(bundle.files) + 1 == len(list(sound.iterdir()))


def test_inspect_tells_what_the_bundle_tells(sound: Path) -> None:
    facts = json.loads(run("inspect", str(sound), "--json").stdout)
    bundle = stagepack.open(sound)
    assert facts["digest"] == bundle.digest
    assert facts["version"] == bundle.manifest.version
    assert facts["symbols"] == {"batch": {"min": 1, "max": 64}}
    assert [stage["weight_bytes"] for stage in facts["stages"]] == [stage.weight_bytes for stage in bundle.stages]
    assert [stage["state"] for stage in facts["stages"]] == [[], [], ["calls"]]
    assert [edge["name"] for edge in facts["edges"] if edge["result"]] == ["div_7", "mul_8"]
    assert [(edge["producer"], edge["consumers"]) for edge in facts["edges"]][:2] == [(None, [0]), (0, [1])]
    assert facts["bytes"] == sum(file.size for file in bundle.manifest.files)
    shown = run("inspect", str(sound)).stdout
    assert all(edge.name in shown for edge in bundle.edges)
    assert bundle.digest in shown
    assert "stage 2 has state: calls" in shown
    assert facts["batching"] == {"forward": {"over": None, "reason": "the model keeps state between calls"}}
    assert "batching: none: the model keeps state between calls" in shown


def test_inspect_of_a_stage_lists_its_nodes_and_weights(sound: Path) -> None:
    facts = json.loads(run("inspect", str(sound), "--stage", "2", "--json").stdout)
    graph = stagepack.open(sound).graph(2)
    assert [node["op"] for node in facts["nodes"]] == [graph.ops[node.op].name for node in graph.nodes]
    tied = next(weight for weight in facts["weights"] if weight["also"])
    assert {tied["name"], *tied["also"]} == {"embed.weight", "head.weight"}
    shown = run("inspect", str(sound), "--stage", "2").stdout
    assert "aten.add_.Tensor" in shown
    assert "\x1b" not in shown


def test_an_example_of_complex_numbers_that_safetensors_lacks_is_replayed(tmp_path: Path) -> None:
    turn = module_of(lambda self, x, point: (x * 1j, point + 1))
    inputs = (torch.randn(2, 3, dtype=torch.complex128), torch.tensor(1 + 2j, dtype=torch.complex128))
    bundle = stagepack.export(turn, inputs, out=tmp_path / "m.stagepack")
    assert replay_example(stagepack.load(bundle)).largest == 0
    assert json.loads(run("load", str(bundle.path), "--inputs", str(bundle.example), "--json").stdout)["outputs"] == 2


def test_a_run_is_traced(sound: Path, tmp_path: Path) -> None:
    trace_file = tmp_path / "trace.json"
    result = run("load", str(sound), "--trace", str(trace_file), "--requests", "3", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)["trace"]
    assert facts["file"] == str(trace_file)
    assert facts["requests"] == 3
    (process,) = facts["processes"]
    assert 0 < process["compute_share"] <= 1
    assert facts["idle"] == pytest.approx(1 - process["compute_share"])
    events = [event for event in json.loads(trace_file.read_bytes())["traceEvents"] if event["ph"] == "X"]
    assert len(events) == facts["spans"]
    stages = [(event["args"]["request"], event["args"]["stage"]) for event in events if event["cat"] == "compute"]
    assert stages == [(request, stage) for request in (2, 3, 4) for stage in range(3)]


def test_a_trace_needs_inputs(editor: BundleEditor) -> None:
    without_example(editor)
    command_fails(
        "load", str(editor.path), "--trace", "trace.json", says="--trace: .* has no example to run: pass --inputs"
    )
