"""Files of a bundle with the names of modules, in the current folder and in a model repository: no process runs them."""

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

import stagepack
from stagepack.errors import InputError
from stagepack_serving.triton.model_configs import RepositoryOptions
from stagepack_serving.triton.repository import write_repository
from stagepack_text.server.chat_template import ChatTemplate
from tests.bundle_editor import BundleEditor

STAGEPACK = Path(sys.executable).with_name("stagepack")
MODULE_NAMES = (
    "torch",
    "msgspec",
    "jinja2",
    "stagepack",
    "stagepack_loaders",
    "stagepack_serving",
    "stagepack_text",
    "stagepack_train",
)


@pytest.fixture
def bundle_with_modules(editor: BundleEditor, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with files that make a file `imported` where they are imported. It is the current folder."""
    code = f"open({str(editor / 'imported')!r}, 'w').close()\nraise SystemExit('imported')\n"
    for module_name in MODULE_NAMES:
        editor.write_file(f"{module_name}.py", code.encode())
    stagepack.open(editor.path).verify()
    monkeypatch.chdir(editor.path)
    return editor.path


@pytest.mark.process
@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.slow), ["--processes", "1"]])
def test_the_processes_of_stages_import_nothing_from_the_current_folder(
    options: list[str], bundle_with_modules: Path
) -> None:
    command = [str(STAGEPACK), "load", ".", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not (bundle_with_modules / "imported").exists()


@pytest.mark.process
def test_the_process_of_templates_imports_nothing_from_the_current_folder(bundle_with_modules: Path) -> None:
    async def render() -> str:
        with contextlib.closing(ChatTemplate("{{ messages[0].content }}", {})) as chat_template:
            return await chat_template.render([{"content": "a"}])

    assert asyncio.run(render()) == "a"
    assert not (bundle_with_modules / "imported").exists()


@pytest.mark.process
@pytest.mark.parametrize("file_name", ["model.py", "config.pbtxt", "libtriton_python.so", "weights"])
@pytest.mark.parametrize("copy", [False, True])
def test_files_that_triton_may_run_are_not_put_into_its_repository(
    file_name: str, copy: bool, editor: BundleEditor, tmp_path: Path
) -> None:
    def rename(fields: dict[str, object]) -> None:
        fields["entry_points"][0]["stages"][1]["weights"] = [file_name]  # type: ignore[index]

    editor.write_file(file_name, (editor / "stage-1.safetensors").read_bytes())
    editor.edit_manifest(rename)
    with pytest.raises(InputError, match=f"found {file_name}: Triton may run"):
        write_repository(
            stagepack.open(editor.path), tmp_path / "repository", RepositoryOptions(model_name="m", copy=copy)
        )
    assert not (tmp_path / "repository").exists()
