"""A delta makes the next version of a bundle: on disk, and in memory."""

import contextlib
import filecmp
import itertools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import stagepack
from stagepack.errors import DigestError, FormatError, OptionError, StagepackError
from stagepack.format.chunk_reads import FileRead
from stagepack.remote.cache import Cache
from stagepack.remote.cache_contents import cached_bundles
from stagepack.remote.stored_composed import store_composed
from tests.deltas.conftest import Versions


def assert_same_folder(found: Path, expected: Path) -> None:
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in found.iterdir()) == names
    assert filecmp.cmpfiles(found, expected, names, shallow=False)[0] == names


@pytest.mark.parametrize("steps", [1, 2])
def test_the_result_has_the_bytes_of_the_new_bundle(versions: Versions, tmp_path: Path, steps: int) -> None:
    deltas = [versions.a_to_b, versions.b_to_c][:steps]
    bundle = stagepack.apply_deltas(versions.a, deltas, out=tmp_path / "m.stagepack")
    expected = [versions.b, versions.c][steps - 1]
    assert bundle.digest == stagepack.open(expected).digest
    assert_same_folder(tmp_path / "m.stagepack", expected)


def test_a_delta_states_what_it_changes(versions: Versions) -> None:
    delta = stagepack.open_delta(versions.a_to_b)
    assert (delta.version, delta.base) == ("step 1", stagepack.open(versions.a).digest)
    assert delta.result == stagepack.open(versions.b).digest
    assert "1.weight" in {name for file_name in delta.changed_files for name in delta.changed_tensors(file_name)}
    delta.verify(strict=True)


@pytest.mark.parametrize(
    "options", [{}, {"copy": True}, {"stream": True}, {"verify": "manifest"}, {"device_memory": "3MB"}], ids=str
)
def test_a_bundle_is_loaded_with_deltas(versions: Versions, options: dict[str, Any]) -> None:
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    before = {path: path.stat().st_mtime_ns for path in versions.folder.rglob("*")}
    pipeline = stagepack.load(versions.a, deltas=[versions.a_to_b, versions.b_to_c], **options)
    with torch.no_grad():
        assert torch.equal(pipeline(x), versions.model("c")(x))
        assert torch.equal(stagepack.load(versions.a)(x), versions.model("a")(x))
    assert before == {path: path.stat().st_mtime_ns for path in versions.folder.rglob("*")}


def test_a_composed_bundle_states_its_changed_tensors(versions: Versions, tmp_path: Path) -> None:
    old, new = stagepack.open(versions.a), stagepack.open(versions.a, deltas=[versions.a_to_b])
    assert new.digest == stagepack.open(versions.b).digest
    assert new.stages == stagepack.open(versions.b).stages
    weight_files = sorted({name for stage in new.stages for name in stage.weights})
    delta = stagepack.open_delta(versions.a_to_b)
    for file_name in weight_files:
        assert new.changed_tensors(file_name) == list(delta.changed_tensors(file_name))
        assert old.changed_tensors(file_name) == []
    stagepack.verify(new)


@pytest.mark.process
def test_processes_load_the_composed_bundle(versions: Versions) -> None:
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    deltas = [versions.a_to_b, versions.b_to_c]
    with torch.no_grad(), stagepack.load(versions.a, deltas=deltas, processes=2) as pipeline:
        assert torch.equal(pipeline(x), versions.model("c")(x))


OPTIONS: tuple[dict[str, Any], ...] = (
    {"copy": True},
    {"stream": True},
    {"device_memory": "1GiB"},
    {"verify": "off"},
    {"verify": "manifest"},
    {"adapters": []},
    {"stages_per_device": [3], "devices": ["cpu"]},
)


@pytest.mark.parametrize("pair", [*itertools.combinations(OPTIONS, 1), *itertools.combinations(OPTIONS, 2)])
def test_no_option_of_a_load_loses_the_deltas(versions: Versions, pair: tuple[dict[str, Any], ...]) -> None:
    options = {name: value for option in pair for name, value in option.items()}
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    deltas = [versions.a_to_b, versions.b_to_c]
    for bundle, chain in ((versions.a, deltas), (stagepack.open(versions.a, deltas=deltas), [])):
        try:
            pipeline = stagepack.load(bundle, deltas=chain, **options)
        except OptionError as error:
            assert "leave out one of them" in str(error)  # noqa: PT017 - right or refused
            continue
        with torch.no_grad():
            assert torch.equal(pipeline(x), versions.model("c")(x))
    with pytest.raises(OptionError, match="give all deltas in one call"):
        stagepack.load(stagepack.open(versions.a, deltas=deltas[:1]), deltas=deltas[1:])


def test_one_stage_is_loaded_with_deltas(versions: Versions) -> None:
    stage = stagepack.load_stage(versions.a, 1, deltas=[versions.a_to_b])
    expected = stagepack.load_stage(versions.b, 1)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(stage.state_dict()[name], tensor)


def test_a_wrong_chain_is_refused_before_anything_is_written(versions: Versions, tmp_path: Path) -> None:
    back = tmp_path / "back.delta"
    stagepack.delta(versions.b, versions.a, out=back)
    cases = (
        ([versions.b_to_c], "found one on"),
        ([versions.a_to_b, versions.a_to_b], "found one on"),
        ([versions.a_to_b, back] * 33, "at most 64 deltas"),
    )
    for deltas, message in cases:
        with pytest.raises(FormatError, match=message) as error:
            stagepack.apply_deltas(versions.a, deltas, out=tmp_path / "m.stagepack")
        assert error.value.problems[0].rule == "Y8"
        with pytest.raises(FormatError, match=message):
            stagepack.load(versions.a, deltas=deltas)
    with pytest.raises(OptionError, match="expected a sequence of deltas"):
        stagepack.load(versions.a, deltas=str(versions.a_to_b))
    with pytest.raises(OptionError, match="found deltas that lead back to the bundle itself"):
        stagepack.apply_deltas(versions.a, [versions.a_to_b, back], out=tmp_path / "m.stagepack")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back.delta"]


@pytest.mark.parametrize("version", [5, None, b"5", ["5"]])
def test_a_version_that_is_no_text_is_named(versions: Versions, tmp_path: Path, version: Any) -> None:
    with pytest.raises(
        OptionError, match=rf"version: expected a text, found {type(version).__name__}: .*: write version="
    ):
        stagepack.delta(versions.a, versions.b, out=tmp_path / "d", version=version)


NO_PATHS: tuple[Any, ...] = (
    None,
    5,
    b"x",
    {"a": 1},
    {"x": None},
    [1],
    [[]],
    "",
    "a\0b",
    "\ud800",
    "x" * 5000,
    object(),
    1.5,
)


@pytest.mark.parametrize(
    "value", NO_PATHS, ids=[f"{type(value).__name__}-{number}" for number, value in enumerate(NO_PATHS)]
)
def test_what_is_no_path_is_refused_by_the_functions_on_deltas_and_adapters(
    versions: Versions, tmp_path: Path, value: Any
) -> None:
    weights, out = versions.model("b").state_dict(), tmp_path / "out"
    pipeline = stagepack.load(versions.a, adapters=[])
    calls: dict[str, Callable[[], object]] = {
        "open": partial(stagepack.open, value),
        "open_delta": partial(stagepack.open_delta, value),
        "open_adapter": partial(stagepack.open_adapter, value),
        "verify": partial(stagepack.verify, value),
        "deltas": partial(stagepack.open, versions.a, deltas=[value]),
        "delta": partial(stagepack.delta, value, weights, out=out),
        "delta new": partial(stagepack.delta, versions.a, cast("Any", [value]), out=out),
        "delta out": partial(stagepack.delta, versions.a, weights, out=value),
        "apply": partial(stagepack.apply_deltas, value, [versions.a_to_b], out=out),
        "apply deltas": partial(stagepack.apply_deltas, versions.a, [value], out=out),
        "apply out": partial(stagepack.apply_deltas, versions.a, [versions.a_to_b], out=value),
        "published out": partial(
            stagepack.write_checkpoint_delta, versions.a, versions.b, out=value, version="1", base_version="0"
        ),
        "write_adapter": partial(stagepack.write_adapter, value, versions.a, out=out),
        "write_adapter source": partial(stagepack.write_adapter, versions.a, value, out=out),
        "write_adapter out": partial(stagepack.write_adapter, versions.a, versions.a, out=value),
        "merge": partial(stagepack.merge_adapter, value, versions.a, out=out),
        "merge adapter": partial(stagepack.merge_adapter, versions.a, value, out=out),
        "merge out": partial(stagepack.merge_adapter, versions.a, versions.a, out=value),
        "update": partial(pipeline.update, value),
        "update deltas": partial(pipeline.update, [value]),
        "load_adapter": partial(pipeline.load_adapter, value),
        "unload_adapter": partial(pipeline.unload_adapter, value),
    }
    if value is not None:
        calls["digest"] = partial(stagepack.open_delta, versions.a_to_b, digest=value)
    for name, call in calls.items():
        with pytest.raises(StagepackError):
            print(name, call())  # noqa: T201 - the call that does not raise


def test_a_base_that_is_cut_short_or_cannot_be_read_is_named(versions: Versions, tmp_path: Path) -> None:
    base = Path(shutil.copytree(versions.a, tmp_path / "a.stagepack"))
    bundle = stagepack.open(base, deltas=[versions.a_to_b])
    path = base / "stage-0.safetensors"
    with contextlib.ExitStack() as open_files:
        read = bundle.open_read(open_files, path.name)
        content = path.read_bytes()
        path.write_bytes(content[:100])
        with pytest.raises(DigestError, match=r"stage-0\.safetensors: the file was cut short while it was read \[D1\]"):
            read.fill(0, memoryview(bytearray(1000)))
    with pytest.raises(DigestError, match=r"stage-0\.safetensors: expected .* bytes"):
        store_composed(bundle, Cache(tmp_path / "cache"))
    assert cached_bundles(Cache(tmp_path / "cache")) == []
    path.write_bytes(content)
    with open("/proc/self/mem", "rb") as memory:  # reading its first byte fails
        read = FileRead(bundle.files[path.name], memory.fileno())
        with pytest.raises(DigestError, match=r"stage-0\.safetensors: the file cannot be read: .* \[D1\]"):
            read.fill(0, memoryview(bytearray(10)))
