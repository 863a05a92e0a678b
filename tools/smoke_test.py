"""Build the wheel, install it into an empty environment without torch, and use it there; then with ONNX Runtime.

An editable install hides what the wheel lacks; this does not.
"""

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = """
import importlib.util, sys, stagepack
assert importlib.util.find_spec("torch") is None
bundle = stagepack.open(sys.argv[1])
bundle.verify()
assert [stage.nodes for stage in bundle.stages] and bundle.graph(0).nodes
try:
    stagepack.load(bundle)
except ModuleNotFoundError as error:
    assert error.name == "torch", error
else:
    raise SystemExit("loading should need torch")
"""


def main() -> None:
    """Do it in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, str(ROOT))
        (wheel,) = Path(folder).glob("*.whl")
        _check_content(wheel)
        venv.create(Path(folder) / "venv", with_pip=True)
        commands = Path(folder) / "venv" / "bin"
        _run(str(commands / "pip"), "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), str(wheel))
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
        more = f"{wheel}[onnxruntime]"
        _run(str(commands / "pip"), "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), more)
        tower = str(ROOT / "schema" / "frozen" / "1.0" / "tower.stagepack")
        for arguments in (["load", tower], ["verify", tower, "--run"]):
            _run(str(commands / "stagepack"), *arguments, "--runtime", "onnxruntime")
        _run(str(commands / "python"), "-c", WITHOUT_TORCH, frozen)
        print(f"{wheel.name}: installs and works without torch, and with ONNX Runtime alone")


def _check_content(wheel: Path) -> None:
    """Compare the wheel with the tree."""
    packages = {"stagepack": ROOT, "stagepack_loaders": ROOT / "loaders"}
    expected = {str(path.relative_to(root)) for name, root in packages.items() for path in (root / name).rglob("*.py")}
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
