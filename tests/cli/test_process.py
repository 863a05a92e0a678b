"""The command as a process of its own: pipes, terminals, signals, and machines without torch."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

import stagepack
from stagepack_loaders.run_trace import RunTrace, write_trace
from stagepack_loaders.spans import Span
from tests.cli.absent_packages import run_without
from tools.fork_server import run_forked

pytestmark = pytest.mark.process

STAGEPACK = str(Path(sys.executable).with_name("stagepack"))


def test_an_export_is_quiet_in_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\ndef model():\n    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))), (torch.ones(1, 4),)\n"
    )
    monkeypatch.chdir(tmp_path)
    result = run_forked("export", "net.py:model", "-o", "m.stagepack", "--stages", "3")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "captured net.py:model (torch.export.export)"
    assert lines[1].startswith("wrote m.stagepack: 3 stages, ")
    assert lines[-1] == "replayed the example: largest difference from the model 0"
    assert all(line.isprintable() for line in lines)
    for arguments in (["load"], ["inspect"], ["inspect", "--json"], ["inspect", "--stage", "1"], ["verify"]):
        result = run_forked(*arguments, "m.stagepack")
        assert (result.returncode, result.stderr) == (0, "")
        assert all(line.isprintable() for line in result.stdout.splitlines())


def test_nobody_who_reads_on_is_no_error(sound: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [STAGEPACK, "inspect", "--json", str(sound)]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert result.returncode == 1
    assert result.stderr == ""


def test_the_module_runs_the_command() -> None:
    """Launchers such as torchrun take a module."""
    done = subprocess.run([sys.executable, "-m", "stagepack", "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "export" in done.stdout


def on_a_terminal(*arguments: str) -> tuple[int, str]:
    """Run the command on a terminal; return its status and all that it showed."""
    ours, theirs = pty.openpty()
    running = subprocess.Popen([STAGEPACK, *arguments], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    return running.wait(), shown.decode()


def test_a_terminal_shows_what_goes_on(sound: Path) -> None:
    status, shown = on_a_terminal("verify", str(sound))
    assert status == 0
    assert "\x1b[" in shown
    assert "verify" in shown
    assert shown.endswith("\r\n")
    assert "all format rules that need no torch" in shown


def test_an_error_on_a_terminal_is_no_traceback_either(sound: Path) -> None:
    status, shown = on_a_terminal("verify", str(sound.parent))
    assert status == 1
    assert "stagepack: " in shown
    assert "Traceback" not in shown


def interrupted_export(folder: Path, is_moment: Callable[[str], bool], **environment: str) -> subprocess.Popen[str]:
    """An export that gets SIGINT after a line on standard error."""
    running = subprocess.Popen(
        [STAGEPACK, "export", "net.py:model", "-o", "m.stagepack"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    assert running.stderr is not None
    assert any(map(is_moment, running.stderr))
    running.send_signal(signal.SIGINT)
    return running


def test_an_interrupt_while_the_model_is_made_leaves_nothing_and_says_little(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import sys, time\ndef model():\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    running = interrupted_export(tmp_path, lambda line: line == "ready\n")
    out, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert out == ""
    assert err.strip() == "stagepack: interrupted"
    assert not (tmp_path / "m.stagepack").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"net.py", "__pycache__"}


def test_an_interrupt_during_the_imports_ends_the_command(tmp_path: Path) -> None:
    """Torch drops an exception while it imports numpy, which cannot be imported again."""
    (tmp_path / "net.py").write_text("import torch\ndef model():\n    return torch.nn.ReLU(), (torch.ones(1),)\n")

    def interrupted_after(module_name: str) -> subprocess.Popen[str]:
        # A line on standard error for each imported module.
        environment = {"PYTHONPROFILEIMPORTTIME": "1"}
        return interrupted_export(tmp_path, lambda line: line.rpartition("|")[2].strip() == module_name, **environment)

    module_names = ("torch.version", "numpy._core._multiarray_umath", "numpy.linalg", "torch.storage")
    for running in [interrupted_after(module_name) for module_name in module_names]:
        out, err = running.communicate(timeout=60)
        lines = [line for line in err.splitlines() if line and not line.startswith("import time:")]
        assert (running.returncode, out, lines) == (130, "", ["stagepack: interrupted"])
    assert {path.name for path in tmp_path.iterdir()} <= {"net.py", "__pycache__"}


PACKAGES = {"torch", "transformers", "sympy", "rich", "numpy"}
WITHOUT = """
import stagepack
from stagepack.cli import main

bundle, outcomes = sys.argv[1], {}
for arguments in json.loads(sys.argv[2]):
    result = CliRunner().invoke(main, [part.replace("BUNDLE", bundle) for part in arguments])
    outcomes[" ".join(arguments)] = [result.exit_code, result.stdout, result.stderr]
opened = stagepack.open(bundle)
opened.verify()
outcomes["weights"] = [[weight.names[0] for weight in opened.graph(number).weights] for number in range(len(opened.stages))]
outcomes["imported"] = sorted(set(PACKAGES) & set(sys.modules))
print(json.dumps(outcomes))
"""


def test_a_machine_without_torch_opens_inspects_and_verifies(sound: Path, tmp_path: Path) -> None:
    trace_file = tmp_path / "run.json"
    span = Span(kind="compute", process=0, thread="stages", request=1, stage=0, start=0, duration=1)
    write_trace(RunTrace(bundle=stagepack.open(sound).digest, processes={0: "process 0"}, spans=[span]), trace_file)
    works = [
        f"report BUNDLE -o {tmp_path}/page.html --trace {trace_file}",
        "inspect BUNDLE",
        "inspect BUNDLE --json",
        "inspect BUNDLE --stage 1",
        "verify BUNDLE",
        "verify BUNDLE --json",
    ]
    lacks = [
        "load BUNDLE",
        "load BUNDLE --stage 1",
        f"profile BUNDLE -o {tmp_path}/times.json",
        "verify --run BUNDLE",
        f"export {tmp_path}/x.py:f -o {tmp_path}/m.stagepack",
    ]
    (tmp_path / "x.py").touch()
    helps = ["--help", "export --help", "load --help", "--version"]
    arguments = json.dumps([line.split() for line in [*works, *lacks, *helps]])
    outcomes = json.loads(run_without(PACKAGES, WITHOUT, str(sound), arguments))
    assert outcomes["imported"] == []
    assert outcomes["weights"][0] == ["embed.weight"]
    for line in [*works, *helps]:
        assert (outcomes[line][0], outcomes[line][2]) == (0, ""), line
    for line in lacks:
        status, out, err = outcomes[line]
        assert (status, out) == (1, ""), line
        extra = "the extra 'torch' of stagepack (in a checkout: pip install '.[torch]')"
        assert err == f"stagepack: the package 'torch' is not installed: {extra} installs it\n"


def test_inspecting_imports_no_torch_where_it_is_installed(sound: Path) -> None:
    code = (
        "import sys\nfrom stagepack.cli import main\n"
        "for more in ([], ['--stage', '1'], ['--json']):\n    main(['inspect', sys.argv[1], *more], standalone_mode=False)\n"
        "main(['verify', sys.argv[1]], standalone_mode=False)\n"
        "import stagepack\nstagepack.open(sys.argv[1]).verify()\n"
        "print(sorted({'torch', 'numpy', 'sympy', 'rich', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(sound)], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


ONNXRUNTIME_ALONE = """
import numpy
import stagepack
from stagepack.cli import main

pipe = stagepack.load(sys.argv[1], runtime="onnxruntime")
x = numpy.arange(60, dtype="float32").reshape(5, 3, 4)
assert [array.shape for array in pipe(x)] == [(5, 3, 2), (2,)]
assert stagepack.load_stage(sys.argv[1], 1, runtime="onnxruntime")(x)[0].shape == x.shape
for line in (
    "load BUNDLE --runtime onnxruntime",
    "load BUNDLE --runtime onnxruntime --stage 1 --json",
    "load BUNDLE --runtime onnxruntime --outputs OUT",
    "load BUNDLE --runtime onnxruntime --inputs BUNDLE/example.safetensors",
    "verify BUNDLE --run --runtime onnxruntime",
):
    arguments = [part.replace("BUNDLE", sys.argv[1]).replace("OUT", sys.argv[2]) for part in line.split()]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stderr) == (0, ""), (line, result.output)
    print(result.stdout)
result = CliRunner().invoke(main, ["onnx", sys.argv[1]])
assert result.exit_code == 1
extras = "the extras torch,onnx of stagepack (in a checkout: pip install '.[torch,onnx]')"
missing = "the packages 'sympy', 'torch', 'onnx', 'onnxscript' are not installed"
assert result.stderr == f"stagepack: {missing}: {extras} install them\\n", result.stderr
assert "torch" not in sys.modules
"""


def test_a_machine_with_onnxruntime_alone_runs_a_bundle(tmp_path: Path) -> None:
    tower = Path(__file__).parents[2] / "schema" / "frozen" / "1.0" / "tower.stagepack"
    out = tmp_path / "out.safetensors"
    lacking = {"torch", "onnx", "onnxscript", "transformers", "sympy"}
    printed = run_without(lacking, ONNXRUNTIME_ALONE, str(tower), str(out))
    assert printed.count("largest difference 0\n") == 3
    assert load_file(out)["output.0"].shape == (2, 3, 2)
