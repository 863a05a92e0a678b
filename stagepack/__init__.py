"""stagepack: ship partitioned PyTorch models as bundles.

The names below are imported when they are first used; those that need torch import it then, not before.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from stagepack import errors
from stagepack.extras import explain_missing_packages

if TYPE_CHECKING:
    __version__: str
    from stagepack import distributed as distributed
    from stagepack import ray as ray
    from stagepack.adapter.opened import OpenAdapter as Adapter
    from stagepack.capture.inputs import Inputs as Inputs
    from stagepack.capture.split_marker import split_here as split_here
    from stagepack.cli.report_page import write_report as report
    from stagepack.deltas.delta import Delta as Delta
    from stagepack.format.reader import Bundle as Bundle
    from stagepack.opening import open_adapter as open_adapter
    from stagepack.opening import open_bundle as open
    from stagepack.opening import open_delta as open_delta
    from stagepack.opening import verify_bundle as verify
    from stagepack.partition.cut_options import PolicyNode as PolicyNode
    from stagepack.partition.cut_options import read_plan as read_plan
    from stagepack.partition.profile import read_profile as read_profile
    from stagepack.roads.adapter import write_adapter as write_adapter
    from stagepack.roads.apply_deltas import apply_deltas as apply_deltas
    from stagepack.roads.assets import add_assets as add_assets
    from stagepack.roads.assets import remove_assets as remove_assets
    from stagepack.roads.checkpoint_delta import write_checkpoint_delta as write_checkpoint_delta
    from stagepack.roads.delta import write_delta as delta
    from stagepack.roads.export import export as export
    from stagepack.roads.merge import merge_adapter as merge_adapter
    from stagepack.roads.onnx import add_onnx as add_onnx
    from stagepack.roads.plan import plan_model as plan
    from stagepack.roads.recut import recut as recut
    from stagepack.roads.save import save as save
    from stagepack.signing.sign import sign_bundle as sign
    from stagepack_loaders.call_limits import Limits as Limits
    from stagepack_loaders.entry_points import load_entry_points as load_entry_points
    from stagepack_loaders.load import load as load
    from stagepack_loaders.load_stage import load_stage as load_stage
    from stagepack_loaders.torch.compilation import compile_ahead as compile
    from stagepack_serving.server.limits import ServerLimits as ServerLimits
    from stagepack_serving.server.server import serve_pipelines as serve
    from stagepack_train.start import train as train

# Public name -> the module that defines it, and its name there. Extensions define the other names of `__all__`.
_HOMES = {
    "Adapter": ("stagepack.adapter.opened", "OpenAdapter"),
    "Bundle": ("stagepack.format.reader", "Bundle"),
    "Delta": ("stagepack.deltas.delta", "Delta"),
    "Inputs": ("stagepack.capture.inputs", "Inputs"),
    "Limits": ("stagepack_loaders.call_limits", "Limits"),
    "PolicyNode": ("stagepack.partition.cut_options", "PolicyNode"),
    "ServerLimits": ("stagepack_serving.server.limits", "ServerLimits"),
    "add_assets": ("stagepack.roads.assets", "add_assets"),
    "add_onnx": ("stagepack.roads.onnx", "add_onnx"),
    "apply_deltas": ("stagepack.roads.apply_deltas", "apply_deltas"),
    "compile": ("stagepack_loaders.torch.compilation", "compile_ahead"),
    "delta": ("stagepack.roads.delta", "write_delta"),
    "export": ("stagepack.roads.export", "export"),
    "load": ("stagepack_loaders.load", "load"),
    "load_entry_points": ("stagepack_loaders.entry_points", "load_entry_points"),
    "load_stage": ("stagepack_loaders.load_stage", "load_stage"),
    "merge_adapter": ("stagepack.roads.merge", "merge_adapter"),
    "open": ("stagepack.opening", "open_bundle"),
    "open_adapter": ("stagepack.opening", "open_adapter"),
    "open_delta": ("stagepack.opening", "open_delta"),
    "plan": ("stagepack.roads.plan", "plan_model"),
    "read_plan": ("stagepack.partition.cut_options", "read_plan"),
    "read_profile": ("stagepack.partition.profile", "read_profile"),
    "recut": ("stagepack.roads.recut", "recut"),
    "remove_assets": ("stagepack.roads.assets", "remove_assets"),
    "report": ("stagepack.cli.report_page", "write_report"),
    "save": ("stagepack.roads.save", "save"),
    "serve": ("stagepack_serving.server.server", "serve_pipelines"),
    "sign": ("stagepack.signing.sign", "sign_bundle"),
    "split_here": ("stagepack.capture.split_marker", "split_here"),
    "verify": ("stagepack.opening", "verify_bundle"),
    "write_adapter": ("stagepack.roads.adapter", "write_adapter"),
    "write_checkpoint_delta": ("stagepack.roads.checkpoint_delta", "write_checkpoint_delta"),
}

# Public modules. `ray` is not in `__all__`: its package is rarely installed, and completion of names would raise for it.
_MODULES = ("distributed", "ray")

__all__ = [
    "Adapter",
    "Bundle",
    "Delta",
    "Inputs",
    "Limits",
    "PolicyNode",
    "ServerLimits",
    "__version__",
    "add_assets",
    "add_onnx",
    "apply_deltas",
    "compile",
    "delta",
    "distributed",
    "errors",
    "export",
    "load",
    "load_entry_points",
    "load_stage",
    "merge_adapter",
    "open",
    "open_adapter",
    "open_delta",
    "plan",
    "read_plan",
    "read_profile",
    "recut",
    "remove_assets",
    "report",
    "save",
    "serve",
    "sign",
    "split_here",
    "train",
    "verify",
    "write_adapter",
    "write_checkpoint_delta",
]


def __getattr__(attribute_name: str) -> Any:
    """Import a public name from the module that defines it."""
    if attribute_name == "__version__":
        return importlib.import_module("importlib.metadata").version("stagepack")
    if attribute_name in _MODULES:
        with explain_missing_packages():
            return importlib.import_module(f"stagepack.{attribute_name}")
    if attribute_name not in __all__:
        raise AttributeError(f"module 'stagepack' has no attribute {attribute_name!r}")
    module_name, home_name = _HOMES.get(attribute_name) or _home_in_extension(attribute_name)
    with explain_missing_packages():
        value = getattr(importlib.import_module(module_name), home_name)
    if (reader := sys.modules.get("stagepack.format.reader")) is not None:
        reader.Bundle.notebook_view = _notebook_view
    return value


def _home_in_extension(public_name: str) -> tuple[str, str]:
    from stagepack.extensions import home_of  # noqa: PLC0415 - it reads the metadata of all distributions: 60 ms

    return home_of(public_name)


def _notebook_view(bundle: Any) -> str:
    html: str = importlib.import_module("stagepack.cli.report_page").notebook_view(bundle)
    return html


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
