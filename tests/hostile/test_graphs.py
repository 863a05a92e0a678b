"""Graphs that lie, each in a bundle whose digests are right. One long table of attacks: to be read, and added to, in one place."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

import stagepack
from stagepack.errors import DeviceError, DigestError, FormatError, LimitError, OperatorError
from stagepack.torch_internals import FakeTensorMode
from tests.bundle_editor import BundleEditor, rename_value
from tests.hostile.attack import Attack, Seen, answer, attacks, change_at, check


def graph(change: Callable[[dict[str, Any]], object], stage: int = 1) -> Callable[[BundleEditor], None]:
    """Change the graph of a stage."""
    return lambda editor: editor.edit_graph(stage, change)


def put(path: str, value: Any) -> Callable[[BundleEditor], None]:
    """Set one field of the graph of stage 1. Its node 1 is gelu."""
    return graph(change_at(path, value))


def rename(new: str, old: str = "linear_1") -> Callable[[BundleEditor], None]:
    """Give a value inside stage 1 another name."""
    return graph(lambda fields: fields.update(rename_value(fields, old, new)))


def operator(name: str, schema: str | None = None) -> Callable[[BundleEditor], None]:
    """Call another operator instead of gelu, with the manifest in agreement."""

    def make(editor: BundleEditor) -> None:
        put("ops/1/name", name)(editor)
        if schema is not None:
            put("ops/1/schema", schema)(editor)
        space = name.split(".")[0]
        if space not in ("aten", "prims", "torch", "math", "operator", "higher_order"):
            editor.edit_manifest(lambda fields: fields["entry_points"][0]["stages"][1].update(namespaces=[space]))

    return make


def argument(value: Any) -> Callable[[BundleEditor], None]:
    """Give gelu something else for its text."""
    return put("nodes/1/kwargs", [["approximate", value]])


def call(positional: int, *names: str) -> Callable[[BundleEditor], None]:
    """Call gelu with other arguments."""

    def change(fields: dict[str, Any]) -> None:
        node = fields["nodes"][1]
        node["args"] = [["value", "linear_1"]] * positional
        node["kwargs"] = [[name, "tanh"] for name in names]
        for key in ("args", "kwargs"):
            if not node[key]:
                del node[key]

    return graph(change)


def context(*contexts: dict[str, Any]) -> Callable[[BundleEditor], None]:
    """Put a node into the last of some regions."""

    def change(fields: dict[str, Any]) -> None:
        fields["contexts"] = list(contexts)
        fields["nodes"][0]["context"] = len(contexts) - 1

    return graph(change)


def autocast(**fields: Any) -> dict[str, Any]:
    """A region of autocast."""
    return {"autocast": {"device": None, "dtype": "bfloat16", "enabled": True, "cache": True} | fields}


def deep(depth: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(depth):
        value = ["list", [value]]
    return value


def subgraph(index: int, *called: int) -> dict[str, Any]:
    """A subgraph that calls others."""
    name = f"inner{index}"
    nodes = [{"op": 0, "args": [["value", name], ["subgraph", other]]} for other in called]
    inputs = [{"name": name, "dtype": "float32"}]
    return {"inputs": inputs, "nodes": nodes, "result": ["value", name]}


def graph_of_another_stage(editor: BundleEditor) -> None:
    """Put the graph of stage 2 in the place of that of stage 1."""
    editor.write_file("stage-1.msgpack", (editor / "stage-2.msgpack").read_bytes())


def raw(content: bytes) -> Callable[[BundleEditor], None]:
    """Put bytes in the place of a graph."""
    return lambda editor: editor.write_file("stage-1.msgpack", content)


def more_after_the_end(editor: BundleEditor) -> None:
    editor.write_file("stage-1.msgpack", (editor / "stage-1.msgpack").read_bytes() + b"\xc0")


def twice(editor: BundleEditor) -> None:
    """Let a key of the graph stand twice; the last one, that most readers take, is the true one."""
    content = (editor / "stage-1.msgpack").read_bytes()
    assert content[0] & 0xF0 == 0x80  # a map of fewer than 16 keys
    raw(bytes([content[0] + 1]) + msgpack.packb("outputs") + msgpack.packb(["ghost"]) + content[1:])(editor)


def twice_inside(editor: BundleEditor) -> None:
    """Let the name of an operator stand twice."""
    content = (editor / "stage-1.msgpack").read_bytes()
    op = msgpack.packb("name") + msgpack.packb("aten.gelu.default")
    start = content.index(op) - 1
    other = msgpack.packb("name") + msgpack.packb("aten.from_file.default")
    raw(content[:start] + bytes([content[start] + 1]) + other + content[start + 1 :])(editor)


NAMES = [
    "x;import os", "for", "class", "None", "True", "a b", "", "1x", "x\n", "é", "x.y", "x-y", "x'",
    "__import__('os')",
]  # fmt: skip
DENIED = [
    "aten.from_file.default", "aten.save.default", "aten.set_.source_Storage", "aten.set_.source_Tensor",
    "aten.record_stream.default", "aten._pin_memory.default", "aten._reshape_alias.default",
    "aten.manual_seed.default", "operator.attrgetter", "operator.methodcaller", "operator.call", "operator.setitem",
    "torch.load", "torch.compile", "math.factorial", "higher_order.print",
    "higher_order.triton_kernel_wrapper_mutation", "higher_order.run_const_graph",
]  # fmt: skip
NO_OPERATORS = ["os.system", "torch.hub.load", "aten.gelu", "aten..x", "aten.gelu.default\n", "exec", "", "a.b.c.d"]
FOREIGN = [
    "mylib.evil.default", "builtins.exec.default", "image.read_file.default", "__main__.main.default", "os.system.x",
]  # fmt: skip

ATTACKS = [
    *attacks(
        FormatError,
        Seen.STAGE,
        *((rename(name), f"node 0: {re.escape(repr(name))} is not an identifier") for name in NAMES),
        (rename("x" * 1025), "is not an identifier"),
        (put("nodes/1/kwargs", [["x=1);print(", 1]]), "argument name 'x=1"),
        *((operator(name), f"{name} is not allowed in a bundle") for name in DENIED),
        *((operator(name), "is not the name of an operator") for name in NO_OPERATORS),
        (operator("aten.gelu.default", "junk(("), "expected the parameters of its schema"),
        (put("ops/1/name", "mylib.evil.default"), "the manifest lists the namespaces none"),
        (put("ops/1/name", "aten.linear.default"), "duplicate operator 'aten.linear.default'"),
        (put("nodes/0/op", 9), "op 9 is not in the table"),
        (put("nodes/0/op", -1), "op -1 is not in the table"),
        (put("nodes/0/scope", 99), "scope 99 is not in the table"),
        (put("nodes/0/context", 0), "context 0 is not in the table"),
        (put("nodes/1/args", [["value", "ghost"]]), "uses 'ghost', which is not defined"),
        (put("nodes/0/args", [["value", "gelu_2"]]), "uses 'gelu_2', which is not"),
        (rename("gelu_2"), "'gelu_2' is defined twice"),
        (rename("w1"), "'w1' is defined twice"),
        (put("outputs", ["ghost"]), "'ghost' is not defined"),
        (put("outputs", ["linear_1"]), "the manifest lists the outputs gelu_2"),
        (graph(lambda fields: fields["nodes"].append({"op": 0})), "the manifest counts 2 nodes, the graph has 3"),
        (graph_of_another_stage, "the manifest lists the inputs embedding_0"),
        (put("inputs/0/dtype", "float64"), "embedding_0 has another dtype, shape"),
        (put("inputs/0/shape", [1]), "embedding_0 has another dtype, shape"),
        (argument(["dtype", "os.system"]), "'os.system' is not the name of a dtype"),
        (argument(["device", "cpu\nx"]), "is not the name of a dtype"),
        (argument(["pickle", "x"]), "Invalid value 'pickle'"),
        (argument(2**63), "out of range|<= 9223372036854775807"),
        (context(autocast(dtype="x;y")), "the dtype or the device of autocast is not a name"),
        (context({"grad": False}, {"parent": 1, "grad": True}), "the parent is not an earlier context"),
        (context({}), "not exactly one of grad and autocast"),
        (context({"grad": True} | autocast()), "not exactly one of grad and autocast"),
        (argument(["subgraph", 0]), "calls subgraph 0, which is not defined before it"),
        (argument(["subgraph", -1]), "calls subgraph -1"),
        (put("subgraphs", [subgraph(0, 0)]), "subgraph 0 node 0: calls subgraph 0"),
        (put("subgraphs", [subgraph(0, 1), subgraph(1, 0)]), "node 0: calls subgraph 1"),
        (put("code", "import os"), "the field 'code' is unknown"),
        (put("nodes/1/code", "x"), r"nodes\[1\]: the field 'code' is unknown"),
        (put("nodes/1/unpack", False), r"nodes\[1\]: the field 'unpack' is unknown"),
        (twice, "duplicate key"),
        (twice_inside, "duplicate key"),
        (raw(b"\xde\x00\x00"), "the manifest|not in its shortest form"),  # number not written shortest
        (raw(b""), "not msgpack"),  # empty file
        (raw(b"import os\n"), "Expected `object`"),  # text file
        (raw(b"\x80\x04\x95\x00."), "not msgpack|not the one|unknown|Expected"),  # pickle
        (raw(b"\x81\xa5nodes\xdd\xff\xff\xff\xff"), "not msgpack"),  # list without end
        (raw(b"\x81\xa5nodes\xdb\xff\xff\xff\xff"), "not msgpack|Expected"),  # text without end
        (raw(b"\xdf\xff\xff\xff\xff"), "not msgpack"),  # map without end
        (raw(b"\x81\xa5other\xdf\xff\xff\xff\xff"), "not msgpack"),  # unknown map without end
        (raw(b"\x81\xa5nodes" + b"\x91" * 100_000), "Expected `array`"),  # lists in lists
        (more_after_the_end, "not msgpack"),
    ),
    *attacks(
        OperatorError,
        Seen.LOAD,
        *(
            (
                operator(name),
                rf"{name} is of the namespace '{name.split('.')[0]}', whose operators run only if you allow it",
            )
            for name in FOREIGN
        ),
        *(
            (operator(name), f"{name} does not exist in torch")
            for name in ["aten.nonsense.default", "aten.gelu.nonsense", "aten.__class__.default", "aten.gelu.__init__"]
        ),
        (
            operator("aten.gelu.default", 'aten::gelu(Tensor self, *, str approximate="tanh") -> Tensor'),
            r'has the schema aten::gelu\(.*approximate="none"\) -> Tensor in torch .*, the bundle was made with .*"tanh"',
        ),
        (operator("aten.relu.default"), "aten.relu.default has the schema"),
        *(
            (call(positional, *names), "gelu.default takes self, approximate; a node passes")
            for positional, names in [
                (0, []),
                (0, ["approximate"]),
                (2, []),
                (1, ["self"]),
                (1, ["more"]),
                (3, ["approximate"]),
            ]
        ),
        (operator("operator.add"), "add takes a, b; a node passes 1"),
        (argument(["dtype", "float99"]), "no dtype 'float99'"),
        (argument(["dtype", "load"]), "no dtype 'load'"),
        (argument(["layout", "os"]), "no layout 'os'"),
        (argument(["memory_format", "hub"]), "format 'hub'"),
        (context(autocast(dtype="hub")), "no dtype 'hub'"),
    ),
    *attacks(
        DeviceError,
        Seen.LOAD,
        (argument(["device", "gpu"]), "stage-1.msgpack: device 'gpu'"),
        (context(autocast(device="gpu")), "stage-1.msgpack: device 'gpu'"),
    ),
    *attacks(
        LimitError,
        Seen.STAGE,
        (
            context({"grad": True}, *({"parent": number, "grad": True} for number in range(64))),
            "contexts are nested deeper than 64",
        ),
        (argument(deep(65)), "arguments are nested deeper than 64"),
        (
            put("subgraphs", [subgraph(0), *(subgraph(number, number - 1) for number in range(1, 65))]),
            "calls of subgraphs are nested deeper than 64",
        ),
        (put("scopes/0/path", "x" * 1025), "the name is too long"),
        (raw(b"\x81\xa5other" + b"\x91" * 100_000), "nested too deep"),  # unknown lists in lists
        (
            raw(b"\x81\xa5nodes\x91\x81\xa4args\x91" + b"\x92\xa4list\x91" * 100_000),
            "nested too deep",
        ),  # arguments without end
    ),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_a_graph_that_lies_is_refused_before_a_weight_is_read(attack: Attack, editor: BundleEditor) -> None:
    check(attack, editor)


def test_all_problems_are_told_at_once(editor: BundleEditor) -> None:
    rename("x;import os")(editor)
    put("nodes/1/op", 9)(editor)
    editor.edit_graph(1, lambda fields: fields["ops"][0].update(name="aten.from_file.default"))
    with pytest.raises(FormatError) as caught:
        stagepack.open(editor.path).graph(1)
    assert {problem.where for problem in caught.value.problems} >= {
        "stage-1.msgpack: node 0",
        "stage-1.msgpack: node 1",
        "stage-1.msgpack: op 0",
    }
    assert all(f"[{problem.rule}]" in str(caught.value) for problem in caught.value.problems)


def test_an_operator_that_refuses_its_arguments_is_in_the_error_and_in_no_log(
    editor: BundleEditor, caplog: pytest.LogCaptureFixture
) -> None:
    # torch logs the traceback of each operator that fails on tensors without data.
    editor.edit_graph(1, lambda fields: fields["nodes"][0]["args"].reverse())
    torch_log = logging.getLogger(FakeTensorMode.__module__)
    torch_log.addHandler(caplog.handler)
    try:
        with pytest.raises(FormatError, match="G16"):
            stagepack.load(editor.path)
    finally:
        torch_log.removeHandler(caplog.handler)
    assert caplog.records == []


def test_very_many_problems_make_one_short_error(editor: BundleEditor) -> None:
    editor.edit_graph(1, lambda fields: fields["nodes"].extend([{"op": 9}] * 5000))
    with pytest.raises(FormatError) as caught:
        stagepack.open(editor.path).graph(1)
    assert len(caught.value.problems) <= 1000
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize(
    "name", ["self", "torch", "device", "inf", "print", "__debug__", "__class__", "_text_0", "x" * 1023]
)
def test_a_value_may_be_called_what_generated_code_calls_its_own(name: str, editor: BundleEditor, sound: Path) -> None:
    expected = answer(sound)
    rename(name)(editor)
    assert torch.equal(answer(editor.path)["logits"], expected["logits"])
    editor.edit_manifest(lambda fields: fields.update(rename_value(fields, "embedding_0", name + "_")))
    for stage in (0, 1):
        editor.edit_graph(stage, lambda fields: fields.update(rename_value(fields, "embedding_0", name + "_")))
    assert torch.equal(answer(editor.path)["logits"], expected["logits"])


def test_what_is_as_deep_as_allowed_is_read(editor: BundleEditor, sound: Path) -> None:
    expected = answer(sound)
    context({"grad": True}, *({"parent": number, "grad": number % 2 == 0} for number in range(63)))(editor)
    put("scopes/0/path", "x" * 1024)(editor)
    assert torch.equal(answer(editor.path)["logits"], expected["logits"])
    argument(deep(64))(editor)
    stagepack.open(editor.path).verify()
    with pytest.raises(FormatError, match=r"gelu.* takes str, the node passes a list \[G16\]"):
        stagepack.load(editor.path)


@pytest.mark.parametrize(
    ("allowed", "is_allowed"),
    [
        *((allowed, True) for allowed in ("mylib", ["mylib"], ("other", "mylib"))),
        *((allowed, False) for allowed in ("mylibrary", "xmylib", ["mylibrary"], ["my", "lib"], "", [])),
    ],
)
def test_a_namespace_is_allowed_by_its_whole_name_and_still_needs_the_operator(
    allowed: Any, is_allowed: bool, editor: BundleEditor
) -> None:
    operator("mylib.evil.default")(editor)
    says = r"mylib\.evil\.default does not exist.*import the library that registers it"
    if not is_allowed:
        says = "is of the namespace 'mylib'"
    with pytest.raises(OperatorError, match=says):
        stagepack.load(editor.path, allow_ops=allowed)


def test_allowing_everything_by_name_does_not_allow_what_is_denied(editor: BundleEditor) -> None:
    operator("aten.from_file.default")(editor)
    with pytest.raises(FormatError, match=r"aten\.from_file\.default is not allowed"):
        stagepack.load(editor.path, allow_ops=["aten", "aten.from_file", "aten.from_file.default", "*"])


def test_a_graph_of_a_newer_minor_version_may_say_more(editor: BundleEditor, sound: Path) -> None:
    expected = answer(sound)
    editor.edit_manifest(lambda fields: fields.update(version="1.7"))
    put("nodes/1/hint", "new")(editor)
    assert torch.equal(answer(editor.path)["logits"], expected["logits"])


def test_a_key_twice_is_refused_in_a_newer_minor_version_too(editor: BundleEditor) -> None:
    editor.edit_manifest(lambda fields: fields.update(version="1.7"))
    twice_inside(editor)
    with pytest.raises(FormatError, match="duplicate key"):
        stagepack.open(editor.path).graph(1)


def test_a_graph_changed_after_sealing_is_refused_before_it_is_parsed(editor: BundleEditor) -> None:
    size = (editor / "stage-1.msgpack").stat().st_size
    (editor / "stage-1.msgpack").write_bytes(b"\x91" * size)
    with pytest.raises(DigestError, match=r"stage-1\.msgpack: the content was changed"):
        stagepack.load(editor.path)
