"""Compile stages with ``torch.compile``, which works at the first call."""

from typing import Any

import torch
from torch.fx import GraphModule

from stagepack.errors import OptionError
from stagepack.format.graph import Graph
from stagepack_loaders.base import Compile
from stagepack_loaders.torch.compilation_units import CompilationUnit, compilation_units, content_key, replace_units


class TorchCompiler:
    """Compiles stages unit by unit, equal units once, however often and in however many stages they are called."""

    def __init__(self, mode: Compile) -> None:
        if mode not in (False, True, "regions", "whole"):
            raise OptionError(f"compile: expected False, True, 'regions' or 'whole', found {mode!r}")
        self._mode = mode
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def compile_stage(self, stage_module: GraphModule, graph: Graph) -> torch.nn.Module:
        """Return the module of a stage that runs compiled."""
        if not self._mode:
            return stage_module
        is_whole = self._mode == "whole"
        units = [CompilationUnit(stage_module, "")] if is_whole else compilation_units(stage_module, graph)
        is_dynamic = bool(graph.symbols)
        return replace_units(stage_module, {unit: self._compile(unit, is_dynamic=is_dynamic) for unit in units})

    def _compile(self, unit: CompilationUnit, *, is_dynamic: bool) -> torch.nn.Module:
        key = (content_key(unit.module), is_dynamic)
        if key not in self._compiled:
            self._compiled[key] = torch.compile(unit.module, dynamic=is_dynamic)
        compiled: torch.nn.Module = self._compiled[key]
        return compiled
