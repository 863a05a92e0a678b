"""The Dockerfile, and the packages that the examples are documented to need."""

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Import name -> distribution, where they differ.
DISTRIBUTIONS = {"PIL": "pillow", "numpy": "tritonclient"}


def imported_names(path: Path) -> Any:
    """The modules that a file imports from elsewhere than the standard library."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module is not None else []
        yield from (module for module in modules if module.partition(".")[0] not in sys.stdlib_module_names)


def test_example_clients_import_what_their_readme_installs() -> None:
    [line] = re.findall(r"^    pip install (.+)$", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    installed = set(
        line.replace("'tritonclient[grpc,http]'", "tritonclient tritonclient.grpc tritonclient.http").split()
    )
    clients = [path for path in (ROOT / "examples").glob("*.py") if "tritonclient" in path.read_text()]
    assert len(clients) == 3
    for client in clients:
        needed = {DISTRIBUTIONS.get(module, module) for module in imported_names(client)}
        assert needed <= installed, client


def test_the_container_does_not_run_as_root() -> None:
    """Kubernetes refuses a user that is given by name where `runAsNonRoot` is set."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    [user] = re.findall(r"^USER (.+)$", dockerfile, re.MULTILINE)
    assert user.isdecimal()
    assert int(user) > 0
    assert f"--uid {user} " in dockerfile


def test_the_container_installs_extras_that_there_are() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    [extras] = re.findall(r'"\.\[(.+)\]"', dockerfile)
    [further_extras] = re.findall(r"--build-arg EXTRAS=(\S+)", dockerfile)
    installed = extras.replace("$RUNTIME", "torch,onnxruntime").replace("${EXTRAS:+,$EXTRAS}", f",{further_extras}")
    assert set(installed.split(",")) <= EXTRAS.keys()


def test_servers_install_what_the_generated_service_imports() -> None:
    """`tritonclient.grpc` imports packages that only the extra `grpc` of tritonclient brings."""
    for extra in ("serve", "triton"):
        assert any(requirement.startswith("tritonclient[grpc]") for requirement in EXTRAS[extra])


def test_the_image_gets_what_the_dockerfile_copies_and_no_more() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert patterns[0] == "*"
    assert {pattern.removeprefix("!") for pattern in patterns[1:] if pattern.startswith("!")} == set(
        " ".join(copied).split()
    )
    assert not any(pattern.startswith("!.") for pattern in patterns)
