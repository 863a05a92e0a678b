"""ONNX files that lie, in bundles whose digests are right: refused by every road before a session is made."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import onnx
import pytest

import stagepack
from stagepack.errors import FormatError, InputError, LimitError, OperatorError, StageFailedError, StagepackError
from stagepack.format.onnx import parse_onnx_model
from stagepack.roads.onnx.check import check_stages
from tests.bundle_editor import BundleEditor
from tests.hostile.attack import command_fails

TOWER = Path(__file__).parents[2] / "schema" / "frozen" / "1.0" / "tower.stagepack"
STAGE, FILE = 2, "stage-2.onnx"


def attacked(tmp_path: Path, change: Callable[[onnx.ModelProto], object]) -> Path:
    editor = BundleEditor.copy(TOWER, tmp_path / "tower.stagepack")
    model = onnx.load(TOWER / FILE, load_external_data=False)
    change(model)
    editor.write_file(FILE, model.SerializeToString())
    return editor.path


def elsewhere(model: onnx.ModelProto, location: str) -> None:
    model.graph.initializer[0].ClearField("raw_data")
    del model.graph.initializer[0].external_data[:]
    model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": "0", "length": "8"}.items():
        model.graph.initializer[0].external_data.add(key=key, value=value)


ATTACKS: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "a path out of the folder": (lambda model: elsewhere(model, "../../../../etc/passwd"), "O4"),
    "an absolute path": (lambda model: elsewhere(model, "/etc/passwd"), "O4"),
    "the weights of another stage": (lambda model: elsewhere(model, "stage-0.safetensors"), "O4"),
    "a way around to a file of the stage": (lambda model: elsewhere(model, "./stage-2.safetensors"), "O4"),
    "an operator of another domain": (lambda model: model.graph.node.add(op_type="Run", domain="com.evil"), "O5"),
    "an input more": (lambda model: model.graph.input.append(model.graph.output[0]), "O3"),
    "a state of another type": (
        lambda model: setattr(model.graph.input[1].type.tensor_type, "elem_type", onnx.TensorProto.INT64),
        "O3",
    ),
    "no graph": (lambda model: model.ClearField("graph"), "O2"),
    "a training part": (lambda model: model.training_info.add(), "O2"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_onnx_file_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    change, rule = ATTACKS[name]
    path = attacked(tmp_path, change)
    for road in (
        lambda: stagepack.open(path).verify(),
        lambda: stagepack.load(path, runtime="onnxruntime"),
        lambda: stagepack.load_stage(path, STAGE, runtime="onnxruntime"),
    ):
        with pytest.raises(FormatError) as caught:
            road()
        assert {problem.rule for problem in caught.value.problems} == {rule}
        assert {problem.where for problem in caught.value.problems} == {FILE}
    command_fails("verify", str(path), says=rf"\[{rule}\]")
    command_fails("load", str(path), "--runtime", "onnxruntime", says=rf"\[{rule}\]")
    stagepack.load(path)  # in torch nobody looks at it
    stagepack.load_stage(path, 0, runtime="onnxruntime")


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda fields: fields["input.x"].update(data_offsets=[0, 95]), FormatError, "W4"),
        (lambda fields: fields["input.x"].update(shape=[24]), InputError, "expected 3 dimensions"),
        (lambda fields: fields["input.x"].update(dtype="I32"), InputError, "int32"),
    ],
)
def test_an_example_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], object], error: type[StagepackError], says: str, tmp_path: Path
) -> None:
    editor = BundleEditor.copy(TOWER, tmp_path / "tower.stagepack")
    editor.edit_weight_header("example.safetensors", change)
    with pytest.raises(error, match=says):
        next(check_stages(stagepack.open(editor.path), ()))


def test_what_onnxruntime_refuses_is_one_line(tmp_path: Path) -> None:
    path = attacked(tmp_path, lambda model: model.graph.node.add(op_type="NoSuchOperator", output=["more"]))
    with pytest.raises(OperatorError, match=r"stage 2: ONNX Runtime .* cannot run it: .*NoSuchOperator"):
        stagepack.load(path, runtime="onnxruntime")
    line = command_fails("load", str(path), "--runtime", "onnxruntime", says="NoSuchOperator")
    assert "EP Error" not in line


def answered_by(*nodes: onnx.NodeProto) -> Callable[[onnx.ModelProto], object]:
    """A change that lets nodes make the first output of a model from what made it, which is named `made`."""

    def change(model: onnx.ModelProto) -> None:
        name = model.graph.output[0].name
        maker = next(node for node in model.graph.node if name in node.output)
        maker.output[list(maker.output).index(name)] = "made"
        for node in model.graph.node:
            node.input[:] = ["made" if value == name else value for value in node.input]
        for node in nodes:
            node.output[:] = [name if value == "out" else value for value in node.output]
            model.graph.node.append(node)

    return change


OTHER_ANSWERS: dict[str, tuple[onnx.NodeProto, ...]] = {
    "one dimension more": (
        onnx.helper.make_node("Shape", ["made"], ["sizes"]),
        onnx.helper.make_node("Constant", [], ["one"], value_ints=[1]),
        onnx.helper.make_node("Concat", ["sizes", "one"], ["shape"], axis=0),
        onnx.helper.make_node("Reshape", ["made", "shape"], ["out"]),
    ),
    "one dimension": (
        onnx.helper.make_node("Shape", ["made"], ["sizes"]),
        onnx.helper.make_node("ReduceProd", ["sizes"], ["count"], keepdims=1),
        onnx.helper.make_node("Reshape", ["made", "count"], ["out"]),
    ),
    "twice as many rows": (onnx.helper.make_node("Concat", ["made", "made"], ["out"], axis=0),),
    "its dimensions in another order": (onnx.helper.make_node("Transpose", ["made"], ["out"]),),
}


@pytest.mark.parametrize("name", OTHER_ANSWERS)
def test_an_answer_of_another_shape_is_one_typed_error(name: str, tmp_path: Path) -> None:
    path = attacked(tmp_path, answered_by(*OTHER_ANSWERS[name]))
    x = numpy.ones((5, 3, 4), "float32")
    with pytest.raises((StageFailedError, OperatorError), match=r"does not state|cannot run it"):
        stagepack.load(path, runtime="onnxruntime")(x)
    with pytest.raises((StageFailedError, OperatorError), match=r"does not state|cannot run it"):
        stagepack.load_stage(path, STAGE, runtime="onnxruntime")(x)


@pytest.mark.parametrize("seed", range(4))
def test_any_bytes_are_read_or_refused(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - for tests
    sound = (TOWER / FILE).read_bytes()
    rules: list[str] = []
    for _ in range(500):
        content = bytearray(sound)
        for _ in range(draw.randint(1, 8)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        if draw.random() < 0.2:
            del content[draw.randrange(len(content)) :]
        try:
            parse_onnx_model(bytes(content), FILE)
        except (FormatError, LimitError) as error:
            rules += [problem.rule for problem in error.problems]
    assert set(rules) <= {"O2", "L2"}
    assert len(rules) > 100
