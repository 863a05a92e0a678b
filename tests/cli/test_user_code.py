"""What a user's own code may do while it is exported: no traceback, no lost output, no half bundle."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import stagepack
from stagepack.cli import main

MODEL = """
import torch
from {helper} import WIDTH

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.first(x))

def model():
    return Net(), (torch.zeros(1, WIDTH),)
"""


def export(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["export", *arguments, "-o", "m.stagepack"])


@pytest.mark.parametrize(
    ("helper", "net", "source"),
    [
        pytest.param("code/helper_a", "code/net_a", "code/net_a.py:model", id="a file beside its helper"),
        pytest.param("helper_j", "code/net_j", "code/net_j.py:model", id="a file and a helper in the current folder"),
        pytest.param("package_b/helper", "package_b/net", "package_b.net:model", id="a module of the current folder"),
    ],
)
def test_code_finds_the_modules_beside_it_and_in_the_current_folder(
    helper: str, net: str, source: str, user: Path
) -> None:
    (user / net).parent.mkdir()
    (user / "package_b").mkdir(exist_ok=True)
    (user / "package_b" / "__init__.py").touch()
    (user / f"{helper}.py").write_text("WIDTH = 3\n")
    (user / f"{net}.py").write_text(MODEL.format(helper=helper.removeprefix("code/").replace("/", ".")))
    result = export(source)
    assert result.exit_code == 0, result.output
    assert {scope.path for scope in stagepack.open(user / "m.stagepack").graph(0).scopes} == {"first", "last"}


def test_what_the_code_prints_does_not_mix_with_the_facts(user: Path) -> None:
    (user / "helper_c.py").write_text("WIDTH = 3\nprint('on import')\n")
    text = MODEL.format(helper="helper_c").replace("    return Net", "    print('in the factory')\n    return Net")
    (user / "net_c.py").write_text(
        text.replace("        return self.last", "        print('in forward')\n        return self.last")
    )
    result = export("net_c.py:model", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["difference"], len(facts["stages"])) == (0, 1)
    assert result.stderr.splitlines()[:2] == ["on import", "in the factory"]
    assert set(result.stderr.splitlines()[2:]) == {"in forward"}


FAILURES = {
    "raises": ("raise ValueError('two\\n\\nlines \\x1b[31m')", "raised ValueError: two lines"),
    "exits": ("import sys; sys.exit('usage: mine')", "raised SystemExit: usage: mine"),
    "imports": ("import no_such_package_d", "raised ModuleNotFoundError: No module named 'no_such_package_d'"),
    "recurses": ("return model()", "raised RecursionError"),
    "asserts": ("assert False", "raised AssertionError (net_d.py, line 9, in model)"),
    "raises in a function": ("return helper()", "raised ValueError: no (net_d.py, line 7, in helper)"),
    "raises in a library": ("return torch.nn.Linear('a', 2)", "(net_d.py, line 9, in model)"),
    "returns None": ("return None", "expected a torch.nn.Module, or a module and its inputs, found NoneType"),
    "returns a class": ("return torch.nn.Linear", "expected a torch.nn.Module, or a module and its inputs, found type"),
    "returns three": ("return torch.nn.Linear(2, 2), (), 3", "found tuple"),
    "inputs are a list": ("return torch.nn.Linear(2, 2), [1]", "a tuple or a dict of example inputs, found list"),
    "inputs are missing": (
        "return torch.nn.Linear(2, 2)",
        "expected example inputs for input, found none: pass --input 'input=float32[batch=1..64,8]'",
    ),
    "inputs do not fit": ("return torch.nn.Linear(2, 2), (torch.zeros(1, 3),)", "Linear cannot be captured"),
    "too many inputs": ("return torch.nn.Linear(2, 2), (torch.zeros(1, 2), 1, 2)", "Linear"),
    "module on meta": ("return torch.nn.Linear(2, 2, device='meta'), (torch.zeros(1, 2),)", "meta"),
    "data decides": ("return Branch(), (torch.zeros(2),)", "(net_d.py, line 3, in forward)"),
    "raises while it runs": (
        "return Bad(), (torch.zeros(2),)",
        "Bad cannot be captured: not today (net_d.py, line 5, in forward)",
    ),
}


@pytest.mark.parametrize(("body", "says"), FAILURES.values(), ids=FAILURES)
def test_a_factory_that_fails_is_said_in_one_line(body: str, says: str, user: Path) -> None:
    (user / "net_d.py").write_text(
        "import torch\n"
        "class Branch(torch.nn.Module):\n    def forward(self, x): return x if x.sum() > 0 else -x\n"
        "class Bad(torch.nn.Module):\n    def forward(self, x): raise RuntimeError('not today')\n"
        "def helper():\n    raise ValueError('no')\n"
        f"def model():\n    {body}\n"
    )
    result = export("net_d.py:model")
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("stagepack: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr[:-1].isprintable()
    assert says in result.stderr
    assert "internal error" not in result.stderr
    assert [path.name for path in user.iterdir() if path.name != "__pycache__"] == ["net_d.py"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def model(:\n", "cannot be imported: SyntaxError"),
        ("import no_such_package_e\n", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package_e'"),
        ("1 / 0\n", "cannot be imported: ZeroDivisionError: division by zero (net_e.py, line 1)"),
        ("\ndef f():\n    1 / 0\nf()\n", "ZeroDivisionError: division by zero (net_e.py, line 3, in f)"),
        ("import sys; sys.exit(3)\n", "cannot be imported: SystemExit: 3"),
        ("model = 3\n", "has no function 'model'"),
        ("def modell(): ...\n", "has no function 'model': did you mean modell?"),
        ("", "has no function 'model'"),
        ("\0", "cannot be imported: "),
    ],
)
def test_a_file_that_cannot_be_imported_is_said_in_one_line(text: str, says: str, user: Path) -> None:
    (user / "net_e.py").write_text(text)
    for arguments in (["net_e.py:model"], ["net_e:model"]):
        result = export(*arguments)
        sys.modules.pop("net_e", None)
        assert result.exit_code == 1, result.output
        assert result.stderr.count("\n") == 1
        assert says in result.stderr
        assert not (user / "m.stagepack").exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nowhere.py:model", "nowhere.py: no such file"),
        ("no_such_module_f:model", "No module named 'no_such_module_f'"),
        ("nowhere.pt2", "nowhere.pt2: no such file or folder; expected"),
        ("./nowhere", "no such file or folder"),
        ("empty", "expected a Hugging Face folder with a config.json"),
        (":model", "expected FILE.py:FUNCTION or package.module:FUNCTION, found no function"),
        ("nowhere.py", "found no function: name the function that makes the model, such as nowhere.py:make"),
        ("there.py", "found no function: name the function that makes the model, such as there.py:make"),
        ("a.stagepack", "expected a model, found a bundle: cut it again by 'stagepack recut'"),
        ("no_such_net:", "cannot be imported"),
    ],
)
def test_a_source_that_is_not_there_is_said_in_one_line(source: str, says: str, user: Path) -> None:
    (user / "empty").mkdir()
    (user / "there.py").write_text("")
    (user / "a.stagepack").mkdir()
    (user / "a.stagepack" / "manifest.json").write_text("{}")
    result = export(source)
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
    assert not (user / "m.stagepack").exists()


def test_a_pt2_file_that_is_something_else_is_said_in_one_line(user: Path) -> None:
    import torch

    torch.save({"x": 1}, user / "other.pt2")
    (user / "text.pt2").write_text("text")
    for name, says in (("other.pt2", "torch.export.load cannot read it"), ("text.pt2", "expected a .pt2 file")):
        result = export(name)
        assert result.exit_code == 1, result.output
        assert result.stderr.count("\n") == 1
        assert says in result.stderr


def test_a_hugging_face_folder_without_transformers_says_what_to_install(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user / "llama").mkdir()
    (user / "llama" / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setitem(sys.modules, "transformers", None)  # as Python itself marks a package that must not be found
    result = export("llama")
    assert result.exit_code == 1, result.output
    extra = "the extra 'hf' of stagepack (in a checkout: pip install '.[hf]')"
    assert result.stderr == f"stagepack: the package 'transformers' is not installed: {extra} installs it\n"


def test_an_interrupt_ends_the_command_without_a_traceback(user: Path) -> None:
    (user / "net_g.py").write_text("def model():\n    raise KeyboardInterrupt\n")
    result = export("net_g.py:model")
    assert result.exit_code == 130
    assert result.output.strip() == "stagepack: interrupted"
    assert not (user / "m.stagepack").exists()


@pytest.mark.parametrize("module", ["no_such_module_h", "broken_h", "leaves_h"])
def test_a_module_to_import_that_fails_is_said_in_one_line(
    module: str, user: Path, sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(user)
    (user / "broken_h.py").write_text("1 / 0\n")
    (user / "leaves_h.py").write_text("raise SystemExit(3)\n")
    for command in (["load", str(sound)], ["verify", "--run", str(sound)]):
        result = CliRunner().invoke(main, [*command, "--import", module])
        assert result.exit_code == 1, result.output
        assert result.stderr.startswith(f"stagepack: --import {module}: ")
        assert result.stderr.count("\n") == 1


def test_what_an_imported_module_prints_does_not_mix_with_the_facts(
    user: Path, sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(user)
    (user / "chatty_i.py").write_text("print('hello')\n")
    result = CliRunner().invoke(main, ["load", str(sound), "--json", "--import", "chatty_i"])
    assert json.loads(result.stdout)["difference"] == 0
    assert result.stderr == "hello\n"
