"""Compile stages with ``torch.compile``: each distinct region once, however often and in however many stages it is called."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from stagepack.errors import OptionError
from stagepack.format.graph import Graph
from stagepack.torch_internals import torch_compile_seconds
from stagepack_loaders.base import Compile
from stagepack_loaders.torch.build import NODES


@dataclass(frozen=True, slots=True)
class CompilationUnit:
    """A part of a stage that is compiled for itself: a region, or the whole stage.

    Attributes:
        owner: the module that calls it.
        name: its name there; empty when it is the owner itself.
    """

    owner: GraphModule
    name: str

    @property
    def module(self) -> GraphModule:
        """What is compiled."""
        found = self.owner.get_submodule(self.name) if self.name else self.owner
        assert isinstance(found, GraphModule)
        return found


def parts(module: GraphModule, graph: Graph) -> list[CompilationUnit]:
    """The parts of a stage: the regions that it calls several times; the stage itself when most of its nodes lie outside of them."""
    calls = Counter(str(node.target) for node in module.graph.nodes if node.op == "call_module")
    found = {CompilationUnit(module, name): count for name, count in calls.items() if count > 1}
    inside = sum(part.module.meta[NODES] * count for part, count in found.items())
    return list(found) if 2 * inside >= len(graph.nodes) else [CompilationUnit(module, "")]


def key(module: GraphModule) -> tuple[Any, ...]:
    """What is equal for modules that compute the same: their code, and the texts and modules that it uses."""
    held = dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module"))
    inside = (getattr(module, name) for name in held)
    return (
        module.code,
        *(
            (name, key(part) if isinstance(part, GraphModule) else part)
            for name, part in zip(held, inside, strict=True)
        ),
    )


class Compiler:
    """Compiles parts, equal ones once."""

    def __init__(self, how: Compile) -> None:
        """`how` is what the caller of `load` asked for."""
        if how not in (False, True, "regions", "whole"):
            raise OptionError(f"compile: expected False, True, 'regions' or 'whole', found {how!r}")
        self._how = how
        self._done: dict[tuple[Any, ...], Any] = {}

    def stage(self, module: GraphModule, graph: Graph) -> torch.nn.Module:
        """The module of a stage that runs compiled; compiling itself happens at the first call."""
        if not self._how:
            return module
        chosen = [CompilationUnit(module, "")] if self._how == "whole" else parts(module, graph)
        dynamic = bool(graph.symbols)
        return replace_parts(module, {part: self._compiled(part, dynamic=dynamic) for part in chosen})

    def _compiled(self, part: CompilationUnit, *, dynamic: bool) -> torch.nn.Module:
        found = key(part.module), dynamic
        if found not in self._done:
            self._done[found] = torch.compile(part.module, dynamic=dynamic)
        compiled: torch.nn.Module = self._done[found]
        return compiled


def replace_parts(module: GraphModule, by: Mapping[CompilationUnit, torch.nn.Module]) -> torch.nn.Module:
    """A stage whose parts are others."""
    for part, other in by.items():
        if not part.name:
            return other
        setattr(module, part.name, other)
    return module


def compile_seconds() -> float:
    """How long ``torch.compile`` has worked in this process, in seconds."""
    return torch_compile_seconds()
