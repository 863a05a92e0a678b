"""The errors that people meet first."""

import itertools
import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import stagepack
from stagepack.cli import main
from stagepack.errors import CutError, InputError, NotABundleError, OptionError, StagepackError
from tests.door.model import EXAMPLE, Scale
from tests.hostile.attack import run
from tests.modules import module_of


def test_each_thing_that_is_no_bundle_has_its_own_message(exported: tuple[Path, object], tmp_path: Path) -> None:
    shutil.copytree(exported[0], tmp_path / "model.stagepack")
    (tmp_path / "empty.stagepack").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    messages = {
        "modl.stagepack": f"no such path: did you mean {tmp_path}/model.stagepack?",
        "other": "no such path",
        "file": "a file",
        "model.stagepack/manifest.json": f"a file: give its folder {tmp_path}/model.stagepack",
        "empty.stagepack": "a folder without it",
        "link": "a link that leads nowhere",
        "llama": "the folder of a Hugging Face model: write its bundle by stagepack export",
    }
    for name, found in messages.items():
        with pytest.raises(NotABundleError) as caught:
            stagepack.open(tmp_path / name)
        expected = f"{tmp_path / name}: not a stagepack bundle: expected a folder with a file manifest.json, found {found} [M1]"
        assert str(caught.value) == expected


def test_an_empty_path_is_not_the_current_folder() -> None:
    for function in (stagepack.open, stagepack.load, stagepack.verify):
        with pytest.raises(NotABundleError, match="expected the path of a bundle, found an empty text"):
            function("")


def test_a_stage_that_cannot_be_cut_needs_more_memory(exported: tuple[Path, object], tmp_path: Path) -> None:
    with pytest.raises(CutError, match="too little: give more memory: it cannot be cut further"):
        stagepack.recut(exported[0], out=tmp_path / "m.stagepack", stages=2, memory=[1, 1])


def test_files_that_are_no_checkpoints_are_named(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(4, 4)\n")
    (tmp_path / "junk.bin").write_text("garbage")
    (tmp_path / "empty.bin").touch()
    torch.save(torch.nn.Linear(4, 4), tmp_path / "whole.pt")
    for name, reason in (
        ("junk.bin", "Unsupported operand 103"),
        ("empty.bin", "EOFError"),
        ("whole.pt", "GLOBAL torch.nn"),
    ):
        arguments = ["--weights", str(tmp_path / name), "--input", "input=float32[2,4]", "-o", str(tmp_path / "out")]
        result = CliRunner().invoke(main, ["export", f"{tmp_path}/net.py:make", *arguments])
        assert result.exit_code == 1
        expected = f"{name}: expected a file that torch.load reads with weights_only=True, found another one ("
        assert expected in result.output
        assert reason in result.output
        assert "torch.save(model.state_dict(), FILE)" in result.output


def test_an_argument_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    masked = module_of(lambda self, x, mask=None, scale=1.0: x * scale if mask is None else x * mask)
    bundle = stagepack.export(masked, (torch.ones(2),), out=tmp_path / "m.stagepack")
    with pytest.raises(InputError, match=r"there is no argument 'y': the model was exported with x, scale$"):
        stagepack.load(bundle)(y=torch.ones(2))


def test_errors_begin_with_the_name_of_the_bundle(exported: tuple[Path, object], tmp_path: Path) -> None:
    path = Path(shutil.copytree(exported[0], tmp_path / "model.stagepack"))
    (path / "stage-1.safetensors").write_bytes(b"")
    manifest = json.loads((path / "manifest.json").read_bytes())
    newer = Path(shutil.copytree(exported[0], tmp_path / "newer.stagepack"))
    (newer / "manifest.json").write_text(json.dumps(manifest | {"version": "2.0"}))
    roads: list[tuple[Path, Callable[[], object]]] = [
        (path, lambda: stagepack.load(path)),
        (path, lambda: stagepack.load(stagepack.open(path))),
        (path, lambda: stagepack.load(path, devices="nonsense")),
        (path, lambda: stagepack.load(path, ["cpu"] * 3)),
        (path, lambda: stagepack.load_stage(path, 1)),
        (path, lambda: stagepack.load_entry_points(path)),
        (path, lambda: stagepack.verify(path)),
        (path, lambda: stagepack.recut(path, out=tmp_path / "out", stages=1)),
        (path, lambda: stagepack.add_onnx(path)),
        (path, lambda: stagepack.open(f"{path}#nothing")),
        (path, lambda: stagepack.open(path, digest="short")),
        (newer, lambda: stagepack.open(newer)),
        (newer, lambda: stagepack.load(newer)),
    ]
    for named, road in roads:
        with pytest.raises(StagepackError, match=f"^{named}: (?!{named})"):
            road()
    for arguments in (
        ["inspect", path, "--stage", 7],
        ["load", path],
        ["verify", path],
        ["plan", path, "--stages", 99],
        ["recut", path, "--stages", 1, "-o", tmp_path / "out"],
        ["report", path, "-o", tmp_path / "out", "--trace", path / "manifest.json"],
        ["compile", path, "-o", tmp_path / "out"],
        ["profile", path, "-o", tmp_path / "out"],
        ["triton", path, "-o", tmp_path / "out"],
        ["serve", path],
        ["asset", "remove", path, "nothing"],
    ):
        result = run(*map(str, arguments))
        assert result.exit_code == 1, result.output
        assert result.stderr.startswith(f"stagepack: {path}"), (arguments, result.stderr)


def test_a_source_of_a_close_name_is_named_before_anything_is_imported(tmp_path: Path) -> None:
    (tmp_path / "net.py").touch()
    (tmp_path / "llama").mkdir()
    for source, near in (("nets.py:make", "net.py"), ("lama/", "llama"), ("net.pt2", "net.py")):
        result = CliRunner().invoke(main, ["export", f"{tmp_path}/{source}", "-o", str(tmp_path / "out")])
        assert result.exit_code == 1
        assert "no such file" in result.stderr
        assert f": did you mean {tmp_path}/{near}?" in result.stderr


def test_a_file_of_import_is_named_as_a_module() -> None:
    result = run("load", "m.stagepack", "--import", "ops/cppop.py")
    assert result.stderr == (
        "stagepack: --import ops/cppop.py: expected the name of a module, found a file: write it without .py: --import ops.cppop\n"
    )


def test_a_taken_port_is_refused_before_models_are_loaded(exported: tuple[Path, object]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flag, protocol in (("--http-port", "HTTP"), ("--grpc-port", "gRPC")):
            ports = {"--http-port": "0", "--grpc-port": "0", flag: str(port)}
            result = run("serve", str(exported[0]), *itertools.chain(*ports.items()))
            assert (
                result.stderr
                == f"stagepack: 127.0.0.1 port {port}: cannot listen for {protocol}: Address already in use\n"
            )


def test_processes_in_a_process_of_torchrun_are_refused(
    exported: tuple[Path, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(variable, value)
    says = r"processes: torchrun has started this process as one of 2, .*distributed\.connect"
    with pytest.raises(OptionError, match=says):
        stagepack.load(exported[0], processes=True)


def test_the_old_names_of_require_signature_are_accepted(exported: tuple[Path, object], tmp_path: Path) -> None:
    (tmp_path / "signer.pub").write_text("no key")
    for flag in ("--require-signature", "--key", "--certificate"):
        result = CliRunner().invoke(main, ["verify", str(exported[0]), flag, str(tmp_path / "signer.pub")])
        assert result.exit_code == 1
        assert "signer.pub" in result.stderr, result.stderr


def test_inspect_shows_results_by_the_names_of_callers(exported: tuple[Path, object]) -> None:
    shown = CliRunner().invoke(main, ["inspect", str(exported[0])]).output
    assert re.search(r"\n  \S+ +float32\[3, 4\] +stage 1 +result output\n", shown), shown
    facts = json.loads(CliRunner().invoke(main, ["inspect", str(exported[0]), "--json"]).output)
    assert [edge["outputs"] for edge in facts["edges"] if edge["result"]] == [["output"]]


def test_a_number_of_stages_is_a_number(tmp_path: Path) -> None:
    for stages in ("2", 2.0, True):
        with pytest.raises(CutError, match=f"stages: expected a whole number or 'layers', found {stages!r}"):
            stagepack.export(Scale(), (EXAMPLE,), out=tmp_path / "m.stagepack", stages=stages)  # type: ignore[arg-type]
