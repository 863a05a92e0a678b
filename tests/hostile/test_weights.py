"""Weight files and weight tables that lie, each in a bundle whose digests are right; and names of weights, which may be anything."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import stagepack
from stagepack.errors import FormatError, LimitError, UnsupportedError
from stagepack.roads.compare import compare_bundles
from stagepack_loaders.example import replay_example
from stagepack_loaders.torch.stage import TorchStage
from tests.bundle_editor import BundleEditor, weight_file
from tests.hostile.attack import Attack, Seen, attacks, check
from tests.modules import module_of

FILE = "stage-1.safetensors"  # holds first.weight, float32 [8, 4], and first.bias, float32 [8]


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[BundleEditor], None]:
    """Change the header of the weight file of stage 1."""
    return lambda editor: editor.edit_weight_header(FILE, change)


def entry(name: str = "first.bias", **fields: Any) -> Callable[[BundleEditor], None]:
    """Change fields of one tensor of the header."""
    return header(lambda tensors: tensors[name].update(fields))


def file(content: bytes) -> Callable[[BundleEditor], None]:
    """Put bytes in the place of the weight file."""
    return lambda editor: editor.write_file(FILE, content)


def weight(**fields: Any) -> Callable[[BundleEditor], None]:
    """Change the entry of first.bias in the weight table of stage 1."""
    return lambda editor: editor.edit_graph(1, lambda graph: graph["weights"][1].update(fields))


def more(**fields: Any) -> Callable[[BundleEditor], None]:
    """Add an entry to the weight table of stage 1: a view on first.bias unless told otherwise."""
    view = {"value": "w9", "names": ["view"], "kind": "buffer", "dtype": "float32", "shape": [8], "strides": [1]}
    return lambda editor: editor.edit_graph(
        1, lambda graph: graph["weights"].append(view | {"base": "first.bias"} | fields)
    )


def twice(editor: BundleEditor) -> None:
    """Let a tensor stand twice in the header."""
    content = (editor / FILE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length].strip()
    again = b',"first.bias":' + text.split(b'"first.bias":')[1]
    editor.write_file(FILE, weight_file(text[:-1] + again, content[8 + length :]))


def in_two_files(editor: BundleEditor) -> None:
    """Let the stage read a second file with tensors of the same names."""
    editor.write_file("stage-7.safetensors", (editor / FILE).read_bytes())
    editor.edit_manifest(lambda fields: fields["entry_points"][0]["stages"][1]["weights"].append("stage-7.safetensors"))


def file_twice(editor: BundleEditor) -> None:
    """Let the stage name its file twice."""
    editor.edit_manifest(lambda fields: fields["entry_points"][0]["stages"][1]["weights"].append(FILE))


def graph_as_weights(editor: BundleEditor) -> None:
    """Let the stage take its graph for a weight file."""
    editor.edit_manifest(lambda fields: fields["entry_points"][0]["stages"][1].update(weights=["stage-1.msgpack"]))


def of_other_dtype(editor: BundleEditor) -> None:
    """Say that first.bias holds integers."""
    weight(dtype="int32")(editor)
    editor.edit_graph(1, lambda graph: graph["weights"][1].pop("trainable"))


def without_strides(editor: BundleEditor) -> None:
    """Add a view that has no strides."""
    more()(editor)
    editor.edit_graph(1, lambda graph: graph["weights"][2].pop("strides"))


def bytes_that_no_tensor_has(editor: BundleEditor) -> None:
    editor.write_file(FILE, (editor / FILE).read_bytes() + b"\0" * 64)


def pickled(editor: BundleEditor) -> None:
    """A file that torch.save wrote, which torch.load would run."""
    torch.save({"first.bias": torch.zeros(8)}, editor / FILE)
    editor.write_file(FILE, (editor / FILE).read_bytes())


ATTACKS = [
    *attacks(
        FormatError,
        Seen.STAGE,
        (file(b""), f"{FILE}: the header states 0 bytes, the file has 0"),  # empty file
        (file(b"\0" * 7), f"{FILE}: the header states 0 bytes, the file has 7"),  # seven bytes
        (file(b"\0" * 8), f"{FILE}: not JSON"),  # no header
        (file((99).to_bytes(8, "little") + b"{}"), "states 99 bytes, the file has 10"),  # header past the end
        (file(weight_file(b"__import__('os').system('x')", b"")), "not JSON"),  # header is code
        (file(weight_file(b"[]", b"")), "expected a header that is a JSON object"),  # header is a list
        (file(weight_file(b" {}", b"")), "begins with {"),  # header begins late
        (file(weight_file(b'{"\xff": 1}', b"")), "not JSON"),  # header is not UTF-8
        (twice, "duplicate key 'first.bias'"),
        (header(lambda tensors: tensors.update(__metadata__={"a": ["x"]})), "__metadata__"),  # metadata is code
        (header(lambda tensors: tensors.update(x="y")), f"{FILE}: x: expected an object"),  # tensor is a text
        (entry(code="x"), "first.bias: expected an object with dtype, shape and data_offsets"),
        (entry(dtype="OBJECT"), "first.bias: expected a dtype of safetensors"),
        (entry(dtype=1), "first.bias: expected a dtype of safetensors"),
        (entry(shape=[-8]), "first.bias: expected sizes and offsets from 0 to"),
        (entry(shape=[8.0]), "first.bias: expected sizes and offsets from 0 to"),
        (entry(shape=[True, 8]), "first.bias: expected sizes and offsets from 0 to"),
        (entry(shape=[2**64]), "expected sizes and offsets from 0 to|out of range"),
        (entry(shape=[2**32, 2**32, 8]), "as the product of the sizes above 0"),
        (entry(shape=[1] * 64 + [8]), "at most 64 sizes"),
        (entry(data_offsets=[128, 2**40]), "bytes of its offsets do not fit"),
        (entry(data_offsets=[-32, 0]), "expected sizes and offsets from 0 to"),
        (entry(data_offsets=[160, 128]), "bytes of its offsets do not fit"),
        (entry(data_offsets=[64, 96]), "begins at byte"),
        (entry(data_offsets=[160, 192]), "begins at byte|the tensors end at byte"),
        (bytes_that_no_tensor_has, r"the tensors end at byte \d+, the file at \d+"),
        (entry("first.weight", shape=[7, 4], data_offsets=[0, 112]), "begins at byte"),  # not aligned
        (in_two_files, "'first.bias' is in another file too"),
        (of_other_dtype, r"'first.bias' is int32 \[8\], its file has F32"),
        (weight(shape=[9]), r"float32 \[9\], its file has F32 \[8\]|refuses its arg"),
        (weight(shape=[2, 4]), r"float32 \[2, 4\], its file has F32 \[8\]|refuses its arg"),
        (weight(names=["ghost"]), "the weight 'ghost' is in none of the stage's weight files"),
        (weight(names=["second.bias"]), "'second.bias' is .*(G19|W7)"),
        (weight(names=[""]), "a name is empty"),
        (weight(names=["first.bias", "first.weight"]), "or a duplicate one"),
        (weight(names=["__padding__1"]), "or reserved in weight files"),
        (weight(names=["__metadata__"]), "or reserved in weight files"),
        (weight(value="x;import os"), "the name is not an identifier"),
        (weight(kind="pickle"), "Invalid enum value 'pickle'"),
        (weight(dtype="object"), "'object' is not a dtype of stored tensors"),
        (weight(dtype="int32"), "or cannot be trained"),
        (weight(strides=[2]), "strides that leave gaps or overlap"),
        (weight(strides=[0]), "strides that leave gaps or overlap"),
        (weight(strides=[]), "the number of strides differs from the number of dimensions"),
        (weight(strides=[-1]), "sizes, strides and an offset from 0"),
        (weight(offset=1), "has an offset"),
        (more(offset=1), "the view 'view' ends past the last byte of 'first.bias'"),
        (more(offset=2**61), "the view 'view' ends past the last byte"),
        (more(offset=-1), "sizes, strides and an offset from 0"),
        (more(strides=[2**61]), "the view 'view' ends past the last byte"),
        (more(dtype="complex128", shape=[3]), "the view 'view' ends past the last byte"),
        (without_strides, "a weight with a base has no strides"),
        (more(base="ghost"), "the weight 'view' is in none of the stage's weight files"),
        (more(shape=[2**31, 2**32], strides=[0, 0]), "at most 4611686018427387904 elements"),
        (more(shape=[2**62, 2**62, 0], strides=[1, 1, 1]), "at most 4611686018427387904 elements"),
        file=FILE,
    ),
    *attacks(
        LimitError,
        Seen.STAGE,
        (file(b"\xff" * 64), r"the header states \d+ bytes"),  # header without end
        (file((100_000_001).to_bytes(8, "little")), "states 100000001 bytes"),  # header just over the limit
        (pickled, FILE),
        (file(weight_file(b'{"a":' * 100_000, b"")), "nested too deep"),  # header is nested
        (graph_as_weights, r"stage-1\.msgpack: the header states"),
        file=FILE,
    ),
    *attacks(FormatError, Seen.OPEN, (file_twice, r"stage 1: names the weight files .* several times \[M6\]")),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_weights_that_lie_are_refused_before_they_are_read(attack: Attack, editor: BundleEditor) -> None:
    check(attack, editor)


def test_a_view_may_be_longer_than_memory_as_long_as_it_lies_in_its_base(editor: BundleEditor) -> None:
    more(shape=[2**40], strides=[0])(editor)
    view = stagepack.load(editor.path).state_dict()["view"]
    assert view.shape == (2**40,)
    assert view[0] == view[-1]


def test_very_many_problems_of_a_header_make_one_short_error(editor: BundleEditor) -> None:
    tensors = {f"t{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(20_000)}
    header(lambda found: found.update({name: {**part, "data_offsets": [160, 160]} for name, part in tensors.items()}))(
        editor
    )
    with pytest.raises(FormatError) as caught:  # 160 is no multiple of 64
        stagepack.open(editor.path).verify()
    assert len(str(caught.value)) < 5000


ODD = [
    "for", "class", "None", "self", "lambda x: x", "a b", "x'y", 'x"y', "new\nline", "nul\0byte", "tab\t", "\x1b[31m",
    "é", "重み", "🙂", "1", "x;import os", "__import__('os')", "{x}", "%s", "\\", "/etc/passwd", "C:\\x", "__class__",
    "_parameters", "_slots", "_held", "graph", "device", "x" * 900,
]  # fmt: skip


class Odd(torch.nn.Module):
    """A module whose parts all have odd names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ODD[:8]})
        for number, name in enumerate(ODD):
            kept = torch.nn.Parameter(torch.full((2,), 1.0 + number))
            self.layers["for"]._parameters[name] = kept
            self.layers["class"]._buffers[name] = torch.full((2,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use each of them."""
        for layer in self.layers.values():
            x = layer(x)
        for name in ODD:
            scale, shift = self.layers["class"]._buffers[name], self.layers["for"]._parameters[name]
            assert scale is not None
            assert shift is not None
            x = x * scale + shift
        return x


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Odd, Path]:
    """The module and its bundle in two stages."""
    model, out = Odd(), tmp_path_factory.mktemp("odd") / "odd.stagepack"
    stagepack.export(model, (torch.ones(3, 2),), out=out, stages=2)
    return model, out


def test_weights_of_any_name_come_back(odd: tuple[Odd, Path]) -> None:
    model, path = odd
    bundle = stagepack.open(path)
    bundle.verify()
    pipe = stagepack.load(bundle)
    assert replay_example(pipe).largest == 0.0
    state = pipe.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    model.load_state_dict(state)


def test_weights_of_any_name_can_be_read_with_safetensors_alone(odd: tuple[Odd, Path]) -> None:
    model, path = odd
    found: set[str] = set()
    for file in path.glob("s*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names = tensors.keys()
        found.update(name for name in names if not name.startswith("__padding__"))
    assert found == set(model.state_dict())


def test_names_of_weights_never_reach_generated_code(odd: tuple[Odd, Path]) -> None:
    for stage in stagepack.load(odd[1]).stages:
        assert isinstance(stage, TorchStage)
        code = stage.graph_module.code + "".join(
            part.code for part in stage.graph_module.children() if isinstance(part, torch.fx.GraphModule)
        )
        assert "import os" not in code
        assert "layers" not in code
        assert "passwd" not in code


@pytest.mark.parametrize("name", ["__padding__", "__padding__7", "__metadata__", "x" * 1100, "\ud800"])
def test_names_that_a_weight_file_cannot_hold_are_refused_at_export(name: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model._parameters[name] = model._parameters.pop("weight")
    model._parameters["weight"] = model._parameters[name]
    with pytest.raises(UnsupportedError, match="cannot be stored under this name: rename it in the model"):
        stagepack.export(model, (torch.ones(3, 2),), out=tmp_path / "m.stagepack")
    assert list(tmp_path.iterdir()) == []


def name_like_the_first(editor: BundleEditor) -> None:
    """Let a weight of stage 1 have the name of one of stage 0, in a file of its own."""

    def rename(tensors: dict[str, Any]) -> None:
        renamed = {"0.bias" if name == "1.bias" else name: fields for name, fields in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    editor.edit_graph(1, lambda graph: graph["weights"][1].update(names=["0.bias"]))
    editor.edit_weight_header(FILE, rename)


@pytest.mark.parametrize(
    "read",
    [
        lambda path: stagepack.open(path).verify(),
        stagepack.load,
        lambda path: stagepack.load(path, stream=True),
        lambda path: stagepack.load(path, device_memory=2**20),
        lambda path: stagepack.recut(path, stages=1, out=path.parent / "again.stagepack"),
        lambda path: compare_bundles(stagepack.open(path), stagepack.open(path.parent / "m.stagepack")),
    ],
    ids=["verify", "load", "stream", "device memory", "recut", "diff"],
)
def test_two_weights_of_one_name_are_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    original = stagepack.export(model, (torch.ones(2, 4),), out=tmp_path / "m.stagepack", stages=2).path
    editor = BundleEditor.copy(original, tmp_path / "changed.stagepack")
    name_like_the_first(editor)
    with pytest.raises(FormatError, match=r"the weight '0.bias' .*another stage.*(G19|W8)"):
        read(editor.path)
    # Alone, each stage has what is in its own file.
    hidden = model[0](torch.ones(2, 4))
    assert stagepack.load_stage(editor.path, 1)(hidden)[0].equal(model[1](hidden))


@torch.library.custom_op("hostile_texts::spell", mutates_args=())
def spell(x: torch.Tensor, text: str) -> torch.Tensor:
    """The bytes of a text."""
    return x.new_tensor(list(text.encode()))


@spell.register_fake
def _(x: torch.Tensor, text: str) -> torch.Tensor:
    return x.new_empty(len(text.encode()))


TEXTS = ["", "'", '"', "'''\"\"\"", "\n", "\r\n", "\\", "\\n", "\0", "{x}", "%s", "é🙂", "');import os;('", "x" * 5000]


def run_speller(_: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gives texts to an operator."""
    return tuple(torch.ops.hostile_texts.spell(x, text) for text in TEXTS)


def test_texts_among_the_arguments_come_back_and_never_reach_code(tmp_path: Path) -> None:
    bundle = stagepack.export(module_of(run_speller), (torch.zeros(1),), out=tmp_path / "m.stagepack", stages=2)
    pipe = stagepack.load(bundle, allow_ops=["hostile_texts"])
    assert [bytes(map(int, spelled)).decode() for spelled in pipe(torch.zeros(1))] == TEXTS
    for stage in pipe.stages:
        assert isinstance(stage, TorchStage)
        assert "import os" not in stage.graph_module.code
