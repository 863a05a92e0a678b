"""Changes of one statement of several that must agree: digests and forms stay right, so that only a comparison can find them."""

# Long because it is one table of changes, which is read as a whole.

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import msgpack

from stagepack.errors import StagepackError
from stagepack.format.graph_codec import read_graph
from stagepack.format.validate.stage_rules import StageGraph
from tests.bundle_editor import BundleEditor, sort_graph, sort_manifest
from tests.fuzz.mutation import locations

Fields = dict[str, Any]


class Statements:
    """The manifest entry of an entry point and the graphs of its stages, as plain containers with regions, for one change."""

    def __init__(self, editor: BundleEditor, choose: random.Random) -> None:
        self.editor = editor
        self.manifest = editor.manifest()
        self.entry: Fields = choose.choice(self.manifest["entry_points"])
        self.graphs: list[Fields] = [
            msgpack.unpackb((editor / stage["graph"]).read_bytes()) for stage in self.entry["stages"]
        ]
        self.choose = choose

    def stage(self) -> Fields:
        stage: Fields = self.choose.choice(self.entry["stages"])
        return stage

    def graph(self) -> Fields:
        return self.choose.choice(self.graphs)

    def nodes(self) -> list[Any]:
        return [node for graph in self.graphs for node in graph.get("nodes", []) if isinstance(node, dict)]

    def values(self) -> list[Fields]:
        """All that the graphs state of values, other than weights."""
        outputs = [value for node in self.nodes() for value in node.get("outputs", []) if value is not None]
        return [*outputs, *(value for graph in self.graphs for value in graph.get("inputs", []))]

    def weights(self) -> list[Fields]:
        return [weight for graph in self.graphs for weight in graph.get("weights", [])]

    def write(self, *, restated: bool) -> None:
        """Write all, and make the digests right; `restated` lets the manifest state what follows from each graph by itself."""
        for stage, graph in zip(self.entry["stages"], self.graphs, strict=True):
            content = msgpack.packb(sort_graph(graph))
            self.editor.write_file(stage["graph"], content)
            if restated:
                with contextlib.suppress(StagepackError, KeyError):
                    _restate(stage, content, self.entry)
        files = self.editor.manifest()["files"]
        self.editor.write_manifest(sort_manifest(self.manifest | {"files": files}))


def _restate(stage: Fields, content: bytes, entry: Fields) -> None:
    derived = StageGraph.of(read_graph(content, stage["graph"]).graph)
    graph = derived.graph
    stage["nodes"], stage["flops"] = len(graph.nodes), derived.flops
    stage["inputs"], stage["outputs"] = [value.name for value in graph.inputs], list(graph.outputs)
    stage["state"], stage["namespaces"] = list(derived.written_weights), sorted(derived.namespaces)
    for field in ("nodes", "flops", "inputs", "outputs", "state", "namespaces"):
        if not stage[field]:
            del stage[field]


def change_state(it: Statements) -> None:
    """Another weight, no weight, or a weight less or more is state."""
    stage = it.stage()
    names = [weight["names"][0] for weight in it.weights()] or ["none"]
    state = stage.get("state", [])
    stage["state"] = it.choose.choice(
        [[], state[1:], [*state, it.choose.choice(names)], [it.choose.choice(names)], names]
    )
    if not stage["state"]:
        del stage["state"]


def change_count(it: Statements) -> None:
    """A number of a stage or of a plan is another one."""
    stages = [*it.entry["stages"], *it.entry.get("plan", {}).get("stages", [])]
    stage = it.choose.choice(stages)
    fields = [field for field, value in stage.items() if type(value) is int] or ["weight_bytes"]
    field = it.choose.choice([*fields, "weight_bytes", "flops"])
    stage[field] = max(0, stage.get(field, 0) + it.choose.choice([-1, 1, 4, 2**20, 2**31, 2**40]))


def change_places(it: Statements) -> None:
    """Nodes of a stage are at other positions, or count as added."""
    stage = it.stage()
    places = stage.get("places", [])
    if not places:
        return
    kind = it.choose.randrange(5)
    run = it.choose.choice(places)
    if kind == 0:
        run[0] = max(0, run[0] + it.choose.choice([-1, 1, -2, 2]))
    elif kind == 1:
        stage["added"] = stage.get("added", 0) + 1
        run[0], run[1] = run[0] + 1, run[1] - 1
        stage["places"] = [run for run in places if run[1]]
    elif kind == 2:
        other = it.stage()
        stage["places"], other["places"] = other.get("places", []), places
    elif kind == 3:
        it.entry["stages"][0].pop("places", None)
    else:
        for one in it.entry["stages"]:
            one.pop("places", None)


def change_edge(it: Statements) -> None:
    """An edge has another producer, or other consumers; or its type differs alike in the manifest and in the graphs."""
    edge = it.choose.choice(it.entry["edges"])
    numbers = range(len(it.entry["stages"]))
    if it.choose.random() < 0.5:
        edge["consumers"] = sorted(it.choose.sample(numbers, it.choose.randint(0, len(numbers))))
        if not edge["consumers"]:
            del edge["consumers"]
    else:
        field = it.choose.choice(["dtype", "shape", "expr"])
        donor = it.choose.choice(it.entry["edges"])
        for value in [edge, *(value for value in it.values() if value["name"] == edge["name"])]:
            if field in donor:
                value[field] = copy.deepcopy(donor[field])
            else:
                value.pop(field, None)


def change_symbol(it: Statements) -> None:
    """The range or the example of a symbol is another one, in all files or in one."""
    tables = [it.entry.get("symbols", []), *(graph.get("symbols", []) for graph in it.graphs)]
    names = sorted({symbol["name"] for table in tables for symbol in table})
    if not names:
        return
    name, field = it.choose.choice(names), it.choose.choice(["min", "max", "example"])
    value = it.choose.choice([None, 0, 1, 2, 3, 7, 64, 4096])
    chosen = tables if it.choose.random() < 0.7 else [it.choose.choice(tables)]
    for symbol in (symbol for table in chosen for symbol in table if symbol["name"] == name):
        symbol.pop(field, None)
        if value is not None:
            symbol[field] = value


def change_operator(it: Statements) -> None:
    """An operator draws, views or writes otherwise, in all stages or in one."""
    rows = [op for graph in it.graphs for op in graph.get("ops", [])]
    if not rows:
        return
    name = it.choose.choice(rows)["name"]
    kind = it.choose.randrange(5)
    chosen = [op for op in rows if op["name"] == name]
    for op in chosen if it.choose.random() < 0.6 else [it.choose.choice(chosen)]:
        if kind == 0:
            op["random"] = not op.get("random", False)
        elif kind == 1:
            op["aliases"] = op.get("aliases", [])[1:]
        elif kind == 2 and op.get("parameters"):
            op["aliases"] = [*op.get("aliases", []), [0, op["parameters"][0]]]
        elif kind == 3 and len(op.get("parameters", [])) > 1:
            op["parameters"] = op["parameters"][::-1]
        elif kind == 4:
            op["mutates"] = [] if op.get("mutates") else op.get("parameters", [])[:1]
        for field in ("aliases", "mutates", "random"):
            if not op.get(field):
                op.pop(field, None)


_IN_PLACE: Fields = {
    "name": "aten.relu_.default",
    "schema": "aten::relu_(Tensor(a!) self) -> Tensor(a!)",
    "parameters": ["self"],
    "mutates": ["self"],
    "aliases": [[0, "self"]],
}


def write_memory(it: Statements) -> None:
    """A new node writes a value, a weight or an input, in front of or behind the nodes of a stage; positions move."""
    number = it.choose.randrange(len(it.graphs))
    graph, stage = it.graphs[number], it.entry["stages"][number]
    names = [value["name"] for value in graph.get("inputs", [])]
    names += [weight["value"] for weight in graph.get("weights", [])]
    nodes = graph.setdefault("nodes", [])
    at_end = it.choose.random() < 0.6
    if at_end:
        outputs = [node.get("outputs", []) for node in nodes if isinstance(node, dict)]
        names += [value["name"] for values in outputs for value in values if value]
    if not names:
        return
    ops = graph.setdefault("ops", [])
    index = next((index for index, op in enumerate(ops) if op["name"] == _IN_PLACE["name"]), len(ops))
    if index == len(ops):
        ops.append(copy.deepcopy(_IN_PLACE))
    graph.setdefault("scopes", [{"path": ""}])
    node = {"op": index, "args": [["value", it.choose.choice(names)]], "outputs": [None]}
    nodes.insert(len(nodes) if at_end else stage.get("added", 0), node)
    stage["nodes"] = stage.get("nodes", 0) + 1
    _insert_position(it, number, at_end=at_end)


def _insert_position(it: Statements, number: int, *, at_end: bool) -> None:
    """Move the positions behind a new node of a stage."""
    stage = it.entry["stages"][number]
    places = stage.get("places", [])
    position = (places[-1][0] + places[-1][1] if at_end else places[0][0]) if places else 0
    runs = [one.get("places", []) for one in it.entry["stages"]]
    runs += [one["nodes"] for one in it.entry.get("plan", {}).get("stages", [])]
    for listed in runs:
        moved = []
        for first, count in listed:
            before = min(max(position - first, 0), count)
            moved += [[first, before], [first + before + 1, count - before]]
        listed[:] = [run for run in moved if run[1]]
    if places:
        _add_run(places, position)
    plan = it.entry.get("plan", {}).get("stages", [])
    if plan:
        _add_run(plan[number]["nodes"], position)


def _add_run(runs: list[Any], position: int) -> None:
    members = sorted({*(number for first, count in runs for number in range(first, first + count)), position})
    runs[:] = []
    for number in members:
        if runs and runs[-1][0] + runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])


def change_node(it: Statements) -> None:
    """A constant of a node, or the value that it uses, is another one in one of its copies."""
    nodes = it.nodes()
    if not nodes:
        return
    node = it.choose.choice(nodes)
    args = node.get("args", [])
    if not args:
        return
    index = it.choose.randrange(len(args))
    if isinstance(args[index], list) and args[index][:1] == ["value"]:
        args[index] = ["value", it.choose.choice([*it.values(), *({"name": w["value"]} for w in it.weights())])["name"]]
    elif type(args[index]) in (int, float):
        args[index] += 1


def change_name(it: Statements) -> None:
    """A value has the name of another one, in one stage or in all."""
    values = it.values()
    if not values:
        return
    old, new = it.choose.choice(values)["name"], it.choose.choice(values)["name"]
    chosen = range(len(it.graphs)) if it.choose.random() < 0.3 else [it.choose.randrange(len(it.graphs))]
    for number in chosen:
        it.graphs[number] = _renamed(it.graphs[number], old, new)
    if len(chosen) > 1:
        it.entry.update(_renamed(it.entry, old, new))


def _renamed(fields: Any, old: str, new: str) -> Any:
    if isinstance(fields, dict):
        return {key: _renamed(value, old, new) for key, value in fields.items()}
    if isinstance(fields, list):
        return [_renamed(value, old, new) for value in fields]
    return new if fields == old and isinstance(fields, str) else fields


def change_weight(it: Statements) -> None:
    """A field of a weight is another one, in all stages that have it or in one."""
    weights = it.weights()
    if not weights:
        return
    name = it.choose.choice(weights)["names"][0]
    changes: list[tuple[str, Any]] = (
        [("zeros", True), ("trainable", True), ("kind", "constant"), ("kind", "buffer"), ("names", [name, "second"]),
         ("shape", [2**20]), ("shape", [2**29]), ("shape", [2**43]), ("value", "w0"), ("dtype", "int32")]
    )  # fmt: skip
    field, value = it.choose.choice(changes)
    chosen = [weight for weight in weights if weight["names"][0] == name]
    for weight in chosen if it.choose.random() < 0.6 else [it.choose.choice(chosen)]:
        weight[field] = value
        if field == "shape":
            weight |= {"zeros": True, "names": [f"{name}.zeros"]}
            for stage, graph in zip(it.entry["stages"], it.graphs, strict=True):
                if weight in graph.get("weights", []) and it.choose.random() < 0.7:
                    stage["weight_bytes"] = stage.get("weight_bytes", 0) + 4 * value[0]


def change_signature(it: Statements) -> None:
    """Two inputs or two results change places; a constant is another one."""
    signature = it.entry["signature"]
    result = signature["result"]
    items = result.get("items") or result.get("fields") or []
    if len(items) > 1 and it.choose.random() < 0.5:
        first, second = it.choose.sample(range(len(items)), 2)
        items[first], items[second] = items[second], items[first]
    elif len(signature["parameters"]) > 1:
        first_parameter, second_parameter = it.choose.sample(signature["parameters"], 2)
        first_parameter["tree"], second_parameter["tree"] = second_parameter["tree"], first_parameter["tree"]


def change_example(it: Statements) -> None:
    """The example is that of another seed, is none, or is another file."""
    kind = it.choose.randrange(3)
    if kind == 0:
        it.entry["seed"] = it.entry.get("seed", 0) + 1
    elif kind == 1:
        it.entry.pop("example", None)
    else:
        it.entry["example"] = it.choose.choice(it.manifest["files"])["name"]


def change_guard(it: Statements) -> None:
    """There is one condition on sizes less or more, or one compares otherwise."""
    guards = it.entry.get("guards", [])
    names = [symbol["name"] for symbol in it.entry.get("symbols", [])] or [1]
    relation = it.choose.choice(["eq", "ne", "lt", "le"])
    kind = it.choose.randrange(3)
    if guards and kind == 0:
        guards.remove(it.choose.choice(guards))
    elif guards and kind == 1:
        it.choose.choice(guards)["relation"] = relation
    else:
        guards.append(
            {"left": it.choose.choice(names), "relation": relation, "right": it.choose.choice([*names, 2, 8])}
        )


def change_container(it: Statements) -> None:
    """An argument or a result is in another kind of container, is another constant, or is passed otherwise."""
    found = [fields for fields, _ in locations(it.entry["signature"]) if isinstance(fields, dict)]
    fields = it.choose.choice(found)
    if "kind" in fields:
        fields["kind"] = it.choose.choice(["tuple", "list", "deque", "dict", "OrderedDict", "object"])
    elif fields.get("type") == "constant":
        fields["value"] = it.choose.choice([None, True, 0, 1, -0.0, "x"])
    elif "tree" in fields:
        field = it.choose.choice(["positional", "keyword"])
        if fields.pop(field, None) is None:
            fields[field] = field == "positional"
    if it.choose.random() < 0.1:
        it.manifest["features"] = ["named_tuples"]


def change_onnx(it: Statements) -> None:
    """The ONNX models of two stages change places, a stage has none, or one reads other weight files."""
    stages = it.entry["stages"]
    first, second = it.choose.choice(stages), it.choose.choice(stages)
    kind = it.choose.randrange(3)
    if kind == 0:
        first["onnx"], second["onnx"] = second.get("onnx"), first.get("onnx")
    elif kind == 1:
        first["onnx"] = None
    elif first.get("onnx"):
        names = [file["name"] for file in it.manifest["files"] if file["name"].endswith(".safetensors")]
        first["onnx"]["weights"] = it.choose.sample(names, it.choose.randint(1, len(names)))
    for stage in stages:
        if stage.get("onnx") is None:
            stage.pop("onnx", None)


def change_files(it: Statements) -> None:
    """A stage reads the weight files of another one, or in another order; two stages have each other's graphs."""
    first, second = it.stage(), it.stage()
    field = it.choose.choice(["weights", "weights", "graph", "inputs", "outputs", "state", "namespaces"])
    kind = it.choose.randrange(3)
    if kind == 0 and field != "graph":
        first[field] = first.get(field, [])[::-1]
    elif kind == 1 and field != "graph":
        first[field] = list(dict.fromkeys([*first.get(field, []), *second.get(field, [])]))
    elif field in first and field in second:
        first[field], second[field] = second[field], first[field]
    if not first.get(field):
        first.pop(field, None)


def change_order(it: Statements) -> None:
    """Two nodes of a stage, its inputs, its outputs or its module calls change places."""
    graph = it.graph()
    items = graph.get(it.choose.choice(["nodes", "inputs", "outputs", "calls", "ops", "weights"]), [])
    if len(items) > 1:
        index = it.choose.randrange(len(items) - 1)
        items[index], items[index + 1] = items[index + 1], items[index]


def change_call(it: Statements) -> None:
    """A module call has other nodes, or is in fewer stages."""
    graph = it.graph()
    calls = graph.get("calls", [])
    if not calls:
        return
    call = it.choose.choice(calls)
    kind = it.choose.randrange(3)
    if kind == 0:
        calls.remove(call)
        if not calls:
            del graph["calls"]
    elif kind == 1:
        call["nodes"] = max(1, call["nodes"] + it.choose.choice([-1, 1]))
    elif call["first"].isdecimal():
        call["first"] = str(int(call["first"]) + 1)


def second_entry_point(it: Statements) -> None:
    """There are two entry points of the same files, one of which may be changed afterwards."""
    if len(it.manifest["entry_points"]) < 3:
        it.manifest["entry_points"].append(copy.deepcopy(it.entry) | {"name": f"{it.entry['name']}_too"})


CHANGES: tuple[Callable[[Statements], None], ...] = (
    change_state, change_count, change_places, change_edge, change_symbol, change_operator, write_memory, write_memory, change_node,
    change_name, change_weight, change_signature, change_example, change_order, change_call, second_entry_point,
    change_guard, change_container, change_onnx, change_files,
)  # fmt: skip


def change_statements(editor: BundleEditor, choose: random.Random) -> None:
    for _ in range(choose.choice([1, 1, 1, 2, 3])):
        it = Statements(editor, choose)
        choose.choice(CHANGES)(it)
        it.write(restated=choose.random() < 0.5)
