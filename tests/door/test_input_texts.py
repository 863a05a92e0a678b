"""Example inputs are stated as text, on the command line and in Python."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.export import Dim

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.capture.stated_inputs import image_tensor, parse_inputs, stated_inputs, with_dynamic_sizes
from stagepack.errors import ExportWarning, InputError, OptionError
from stagepack.format.shapes import format_shape
from tests.hostile.attack import command_fails, run
from tests.modules import module_of

MODEL = """
import torch


class Scale(torch.nn.Module):
    def forward(self, x, n=1, mask=None):
        y = x * n
        return y if mask is None else y * mask


def made():
    return Scale(), {"x": torch.ones(4, 6)}
"""


DOWN = """
import torch


class Down(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = torch.nn.Conv2d(3, 4, 4, 4), torch.nn.ConvTranspose2d(4, 3, 4, 4)

    def forward(self, image):
        return image + self.up(self.down(image))


def example():
    return {"image": torch.ones(2, 3, 16, 24)}
"""


class Scale(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int = 3, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x * n if mask is None else x * n * mask


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scale.py").write_text(MODEL)
    return tmp_path


def test_a_tensor_has_a_dtype_sizes_and_named_ranges() -> None:
    inputs = parse_inputs(["x = float16[batch=2..512, 64]", "ids=int64[batch,length=1..]", "flag=bool[]"])
    assert inputs.kwargs["x"].dtype == torch.float16
    assert inputs.kwargs["x"].shape[1:] == (64,)
    assert inputs.kwargs["x"].shape[0] == inputs.kwargs["ids"].shape[0]
    assert inputs.kwargs["ids"].unique().tolist() == [1]
    assert inputs.kwargs["flag"].shape == ()
    batch, length = inputs.dynamic_shapes["ids"].values()
    assert inputs.dynamic_shapes["x"] == {0: batch}
    assert (batch.__name__, batch.min, batch.max, length.min) == ("batch", 2, 512, 1)
    assert inputs.kwargs["ids"].shape[0] != inputs.kwargs["ids"].shape[1]
    assert torch.equal(parse_inputs("x=float32[3]").kwargs["x"], parse_inputs("x=float32[3]").kwargs["x"])


def test_sizes_may_be_multiples_of_a_symbol() -> None:
    inputs = parse_inputs(["image=float32[batch,3,4*h=1..16,2 * w + 1]", "mask=bool[batch,w,h]"])
    height, width = (inputs.dynamic_shapes["image"][axis] for axis in (2, 3))
    assert (height.__name__, height.min, height.max, width.__name__, width.min) == ("4*h", 4, 64, "2*w + 1", 1)
    assert (height.root, width.root) == (inputs.dynamic_shapes["mask"][2], inputs.dynamic_shapes["mask"][1])
    batch, w, h = inputs.kwargs["mask"].shape
    assert inputs.kwargs["image"].shape == (batch, 3, 4 * h, 2 * w + 1)


@pytest.mark.parametrize(
    ("texts", "shapes"),
    [
        (["x=float32[2*n,m]", "y=float32[k]"], {"x": (4, 3), "y": (5,)}),
        (["x=float32[a=3..,b=2..]"], {"x": (3, 4)}),
        (["x=float32[n-2=2..9]"], {"x": (2,)}),
        (["x=float32[a=1..2,b=1..2,2*c=1..2]"], {"x": (2, 2, 4)}),
    ],
)
def test_dimensions_of_the_example_differ_where_their_ranges_allow_it(
    texts: list[str], shapes: dict[str, tuple[int, ...]]
) -> None:
    assert {name: tuple(value.shape) for name, value in parse_inputs(texts).kwargs.items()} == shapes


def test_numbers_words_and_files_are_inputs(folder: Path) -> None:
    np.savez("two.npz", x=np.ones((2, 3), np.float32), y=np.zeros(4, np.int64))
    np.save("one.npy", np.ones(5))
    Image.fromarray(np.full((4, 8, 3), 255, np.uint8)).save("white.png")
    texts = ["@two.npz", "z=@one.npy", "image=@white.png", "n=3", "p=-1e-3", "flag=TRUE", "mask=none"]
    kwargs = parse_inputs(texts).kwargs
    expected = {"x": (2, 3), "y": (4,), "z": (5,), "image": (1, 3, 4, 8)}
    assert {name: tuple(kwargs[name].shape) for name in ("x", "y", "z", "image")} == expected
    assert (kwargs["n"], kwargs["p"], kwargs["flag"], kwargs["mask"]) == (3, -1e-3, True, None)
    assert kwargs["image"].unique().tolist() == [1.0]
    assert image_tensor(folder / "white.png", (2, 3), "L").shape == (1, 1, 2, 3)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["x"], "expected NAME=DTYPE"),
        (["float32[2]"], "expected NAME=DTYPE"),
        (["x=float33[2]"], "expected a dtype of torch such as float32, int64 or bool, found float33"),
        (["x=float32[2,]"], "found nothing"),
        (["x=float32[-1]"], "expected a size such as 64, batch, batch=2..512, 4*h or 2*n+1, found -1"),
        *((["x=float32[2," + size + "]"], f"4*h or 2*n+1, found {size}") for size in ("4h", "0*h", "h*4", "h/2", "h*w", "1+h", "4*(h)")),
        (["x=float32[n-2=1..5]"], "n-2 is -1 where n is 1: let the range of n begin at 2"),
        (["x=float32[n-2]"], "n needs a range with an end: state it, such as n-2=2..512"),
        (["x=float32[4*h=1..9223372036854775807]"], "4*h is no size of 64 bits: state a smaller range of h"),
        (["x=float32[4*h=1..8]", "y=float32[h=1..9]"], "h has another range elsewhere"),
        (["x=float32[b=5..2]"], "expected a range of two sizes or more for b, found 5 to 2"),
        (["x=float32[b=2..5]", "y=float32[b=2..6]"], "b has another range elsewhere"),
        (["x=float32[999999,999999]"], "state smaller sizes"),
        (["n=1", "n=2"], "the input n is there twice"),
        (["x=@nowhere.npz"], "no such file: nowhere.npz"),
        (["x=@scale.py"], "expected a file .npz, .npy, .safetensors or an image"),
        (["@one.npy"], "name the input: NAME=@one.npy"),
        (["y=@pickled.npy"], "cannot read pickled.npy"),
        (["y=@broken.png"], "cannot read broken.png"),
        (["z=@two.npz"], "has no array z: it has x, y"),
    ],
)  # fmt: skip
def test_a_text_that_states_no_input_is_explained(texts: list[str], says: str, folder: Path) -> None:
    np.save("one.npy", np.ones(5))
    np.savez("two.npz", x=np.ones(1), y=np.ones(1))
    np.save("pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    (folder / "broken.png").write_text("no image")
    with pytest.raises(OptionError) as raised:
        parse_inputs(texts)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x0", "expected one of the inputs x, n"),
        ("x", "x is no whole number: name a dimension of it, such as x:0=batch"),
        ("x:2=b", "found x with 2 dimensions"),
        ("n:0=b", "found n with int"),
        ("x:b", "expected NAME:AXIS=SYMBOL"),
    ],
)
def test_a_dynamic_size_must_be_one_of_the_example(text: str, says: str) -> None:
    with pytest.raises(OptionError) as raised:
        with_dynamic_sizes(Inputs(args=(torch.ones(2, 3), 4)), [text], Scale().forward)
    assert says in str(raised.value)


def test_dynamic_sizes_join_those_of_the_example() -> None:
    rows = Dim("rows")
    inputs = Inputs(args=(torch.ones(2, 3), 4), dynamic_shapes={"x": {0: rows}})
    shapes = with_dynamic_sizes(inputs, ["x:1=columns=2..9", "n"], Scale().forward).dynamic_shapes
    assert shapes["x"][0] is rows
    assert (shapes["x"][1].__name__, shapes["x"][1].max) == ("columns", 9)
    assert shapes["n"] == Dim.DYNAMIC


@pytest.mark.parametrize(
    "arguments",
    [
        ["scale.py:Scale", "--input", "x=float32[batch=1..64,6]", "--input", "n=3", "--dynamic", "n"],
        ["scale.py:made", "--dynamic", "x:0=batch=1..64"],
    ],
)
def test_the_command_exports_with_inputs_as_text(arguments: list[str], folder: Path) -> None:
    assert run("export", *arguments, "-o", "m.stagepack").exit_code == 0
    bundle = stagepack.open("m.stagepack")
    assert bundle.edges[0].shape == ("batch", 6)
    symbols = {symbol.name: (symbol.min, symbol.max) for symbol in bundle.entry_point.symbols}
    assert symbols["batch"] == (1, 64)
    x = torch.randn(5, 6)
    expected = x * 7 if "n" in arguments else x
    kwargs: dict[str, Any] = {"n": 7} if "n" in arguments else {}
    assert torch.equal(stagepack.load(bundle)(x=x, **kwargs), expected)


@pytest.mark.parametrize(
    ("arguments", "shape", "good", "bad", "says"),
    [
        (
            ["--input", "image=float32[batch=1..8,3,4*h=2..16,4*w]"],
            "[batch, 3, h*4, w*4]",
            [(1, 3, 8, 12), (5, 3, 64, 8)],
            [(1, 3, 30, 8), (1, 3, 68, 8)],
            ["expected a multiple of 4 from 8 to 64, found 30", "expected a multiple of 4 from 8 to 64, found 68"],
        ),
        (
            ["--inputs", "down.py:example", "--dynamic", "image:2=4*h=1..16", "--dynamic", "image:3=4*w+8"],
            "[2, 3, h*4, w*4 + 8]",
            [(2, 3, 8, 16), (2, 3, 64, 20)],
            [(2, 3, 8, 17)],
            [r"image: dimension 3: expected w\*4 \+ 8 of at least 8, found 17"],
        ),
    ],
)
def test_a_model_that_takes_multiples_is_exported(
    arguments: list[str],
    shape: str,
    good: list[tuple[int, ...]],
    bad: list[tuple[int, ...]],
    says: list[str],
    folder: Path,
) -> None:
    (folder / "down.py").write_text(DOWN)
    done = run("export", "down.py:Down", *arguments, "-o", "m.stagepack")
    assert done.exit_code == 0, done.output
    bundle = stagepack.open("m.stagepack")
    assert format_shape(bundle.edges[0].shape) == shape
    pipe, model = stagepack.load(bundle), runpy.run_path("down.py")["Down"]()
    for sizes in good:
        image = torch.randn(sizes)
        assert torch.equal(pipe(image), model(image))
    for sizes, message in zip(bad, says, strict=True):
        with pytest.raises(InputError, match=message):
            pipe(torch.randn(sizes))


def test_a_range_beside_multiples_is_narrowed(tmp_path: Path) -> None:
    model = module_of(lambda self, x: x * 2 if x.shape[0] < 64 and x.shape[1] <= 40 else x)
    with pytest.warns(ExportWarning, match="does not allow all declared sizes.*batch from 2..99 to 2..63"):
        bundle = stagepack.export(model, inputs="x=float32[batch=2..99,4*h=2..99]", out=tmp_path / "m.stagepack")
    pipe = stagepack.load(bundle)
    for sizes in ((2, 8), (63, 40)):
        assert torch.equal(pipe(torch.ones(sizes)), torch.full(sizes, 2.0))
    for sizes, says in (
        ((64, 40), "expected 2 to 63"),
        ((2, 44), r"expected h\*4 <= 40, for which the model was captured"),
    ):
        with pytest.raises(InputError, match=says):
            pipe(torch.ones(sizes))


def test_a_size_of_the_example_that_is_no_multiple_is_refused(folder: Path) -> None:
    (folder / "down.py").write_text(DOWN)
    command = ["export", "down.py:Down", "--inputs", "down.py:example", "-o", "m", "--dynamic", "image:2=3*h"]
    command_fails(
        *command, says=r"Expected shape\[2\] = 16 of input Tensor to be of the form 3\*h, where h is an integer"
    )


def test_python_takes_the_same_texts(tmp_path: Path) -> None:
    texts = ["x=float32[batch=1..64,6]", "n=3"]
    bundle = stagepack.export(Scale(), inputs=texts, out=tmp_path / "m.stagepack")
    assert bundle.edges[0].shape == ("batch", 6)
    multiples = stagepack.export(Scale(), inputs={"x": "float32[2*rows,6]", "n": 3}, out=tmp_path / "o.stagepack")
    assert format_shape(multiples.edges[0].shape) == "[rows*2, 6]"
    by_name = stated_inputs({"x": "float32[batch=1..64,6]", "n": 3})
    assert by_name.dynamic_shapes["x"][0].max == 64
    assert by_name.kwargs["n"] == 3
    with pytest.raises(OptionError, match="leave these out"):
        stagepack.export(Scale(), (torch.ones(1),), inputs=texts, out=tmp_path / "n.stagepack")


def test_an_input_that_the_model_does_not_take_is_refused(folder: Path) -> None:
    says = "Scale: forward has no parameter y: it takes x, n, mask"
    command_fails("export", "scale.py:Scale", "--input", "y=float32[2]", "-o", "m", says=says)


def test_a_fixed_value_says_how_to_open_it(tmp_path: Path) -> None:
    pipe = stagepack.load(stagepack.export(Scale(), (torch.ones(2, 3), 3), out=tmp_path / "m.stagepack"))
    for call, says in (
        (
            lambda: pipe(torch.ones(2, 3), 5),
            r"n was fixed to 3 .* dynamic_shapes=\{'n': torch.export.Dim.DYNAMIC\} \(--dynamic n\)",
        ),
        (
            lambda: pipe(torch.ones(2, 3), 3, torch.ones(2, 3)),
            "mask was fixed to None .* an example that has mask, and with an entry point",
        ),
        (
            lambda: pipe(torch.ones(5, 3), 3),
            r"dynamic_shapes=\{'x': \{0: torch.export.Dim.DYNAMIC\}\} \(--dynamic x:0\)",
        ),
    ):
        with pytest.raises(InputError, match=says):
            call()


def test_an_image_takes_the_place_of_the_example_of_an_image_model(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 8, 3), 255, np.uint8)).save(tmp_path / "white.png")
    made = Inputs(
        kwargs={"pixel_values": torch.zeros(2, 3, 16, 16)}, dynamic_shapes={"pixel_values": {0: Dim("batch")}}
    )
    inputs = parse_inputs([f"@{tmp_path / 'white.png'}"], lambda: made)
    assert torch.equal(inputs.kwargs["pixel_values"], torch.ones(2, 3, 16, 16))
    assert inputs.dynamic_shapes == made.dynamic_shapes
