"""Collect the wheels that `make gpu` needs on a machine with a CUDA torch and without a package index: ``python -m tools.gpu_wheels``.

That machine has torch, transformers, onnx, onnxruntime, safetensors, numpy and pytest with what they depend on. The folder has the rest,
in the versions of ``constraints.txt``, and the wheel of this package, whose metadata the checkout lacks. It stays within 60 MB.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DEFAULT_FOLDER: Final = ROOT / "build" / "gpu-wheels"
LIMIT_BYTES: Final = 60_000_000
PYTHON_VERSION: Final = "3.12"
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")

# What the machine has, of what stagepack and its server require.
PRESENT: Final = frozenset({"jinja2", "numpy", "safetensors", "sympy", "tokenizers", "torch"})
# By what needs them: each with all that it requires, without what is present.
PACKAGES: Final = {
    "stagepack": ("blake3", "click", "msgspec", "rich", "markdown-it-py", "mdurl", "Pygments", "zstandard"),
    "the server": (
        "anyio", "grpcio", "grpcio-health-checking", "grpcio-reflection", "h11", "idna", "prometheus_client", "protobuf",
        "python-rapidjson", "starlette", "tritonclient", "typing_extensions", "urllib3", "uvicorn", "uvloop",
    ),
    "tests": ("execnet", "pytest-xdist", "torchao"),
}  # fmt: skip
# Loaders that `tools.bench_gpu_load` compares with, and what they need at import. Nothing else of the project needs them.
PEERS: Final = ("fastsafetensors==0.5.0", "humanize==4.17.0", "instanttensor==0.2.2", "runai-model-streamer==0.17.1")


def main() -> None:
    """Download the wheels and build that of this package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    requirements = [*pinned(name for names in PACKAGES.values() for name in names), *PEERS]
    command = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", f"--python-version={PYTHON_VERSION}"]
    subprocess.run([sys.executable, "-m", *command, *platforms, f"--dest={folder}", *requirements], check=True)
    build = ["build", "--wheel", "--no-isolation", f"--outdir={folder}", str(ROOT)]
    subprocess.run([sys.executable, "-m", *build], check=True, stdout=subprocess.DEVNULL)
    print("\n".join(describe_folder(folder)))
    if (byte_count := folder_bytes(folder)) > LIMIT_BYTES:
        sys.exit(f"{folder}: expected at most {LIMIT_BYTES:,} bytes of wheels, found {byte_count:,}")


def pinned(names: Iterable[str], constraints: Path = ROOT / "constraints.txt") -> list[str]:
    """Return requirements with the versions of a file of constraints.

    Raises:
        ValueError: the file lacks a package.
    """
    versions = {
        normalized(match[1]): match[2]
        for match in re.finditer(r"^([\w.-]+)==(\S+)", constraints.read_text(), re.MULTILINE)
    }
    requirements = []
    for name in names:
        if normalized(name) not in versions:
            raise ValueError(f"{constraints.name}: expected a version of {name}, found none")
        requirements.append(f"{name}=={versions[normalized(name)]}")
    return requirements


def normalized(name: str) -> str:
    """Return the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def folder_bytes(folder: Path) -> int:
    """Return the size of all wheels of a folder."""
    return sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))


def describe_folder(folder: Path) -> list[str]:
    """Return a line for each wheel, largest first, and one for all."""
    wheels = sorted(folder.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
    lines = [f"{wheel.stat().st_size / 1e6:6.1f} MB  {wheel.name}" for wheel in wheels]
    return [*lines, f"{folder_bytes(folder) / 1e6:6.1f} MB  in {len(wheels)} wheels in {folder}"]


if __name__ == "__main__":
    main()
