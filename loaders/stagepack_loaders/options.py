"""How a bundle is loaded, and how its processes run: the keywords of `stagepack.load`, made once, handed on whole."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypedDict, get_args

from msgspec import Struct, structs

from stagepack.adapter.opened import OpenAdapter
from stagepack.errors import OptionError
from stagepack.format.quantities import parse_byte_size
from stagepack.named_adapters import check_adapter_name, opening_location
from stagepack.opening import AdapterSource, DeltaSource, TrustedSigners
from stagepack.options import Option

# How `load(..., compile=)` compiles. False: not at all. True or "regions": each distinct region once. "whole": each stage as a whole.
Compile = bool | Literal["regions", "whole"]

# How much `load(..., verify=)` compares with the digests of the manifest: every byte; all but the content of weight files; nothing.
Verify = Literal["full", "manifest", "off"]

# What follows when a process is lost and may be started again: the same processes, or those that are left.
OnLoss = Literal["restart", "regroup"]

# The first runtime of the registry that is installed and that the bundle has files for; see `registry.choose_runtime`.
DEFAULT_RUNTIME: Final = "auto"
# The largest number of requests on their way through the stages, unless the caller names another.
DEFAULT_IN_FLIGHT: Final = 16

# Adapters as callers give them: each as ``NAME=FOLDER``, or with its last part as the name; or by name. None for a pipeline that never
# takes any.
AdapterSources = Sequence[AdapterSource] | Mapping[str, AdapterSource] | None


class LoadKeywords(TypedDict, total=False):
    """The keywords that `stagepack.load` and `stagepack.load_stage` share, for their overloads."""

    types: Collection[type]
    allow_ops: Collection[str]
    verify: Verify
    require_signature: TrustedSigners | None
    deltas: Sequence[DeltaSource]
    copy: bool
    compile: Compile
    compiled: str | os.PathLike[str] | None
    adapters: AdapterSources


class LocalKeywords(LoadKeywords, total=False):
    """Further keywords of stages in this process."""

    stream: bool
    device_memory: int | str | None


class WeightOptions(Struct, frozen=True, kw_only=True):
    """How the weights of stages come into the memory of a device; `device_memory` becomes a number of bytes."""

    copy: Annotated[
        bool, Option("--copy", "Read the weights into memory; by default the CPU maps the weight files.")
    ] = False
    stream: Annotated[
        bool,
        Option(
            "--stream",
            "Compute while the weights are still read or downloaded: each is waited for at its first use. Reads them into memory.",
        ),
    ] = False
    device_memory: Annotated[
        int | str | None,
        Option(
            "--device-memory SIZE",
            "Memory for weights on each device, such as 8GiB: weights that do not fit pass through it in each call.",
            default_text="no limit",
        ),
    ] = None

    @property
    def arriving(self) -> str | None:
        """The option by which weights come while a stage runs, which needs a runtime with `streams` in this process."""
        return "device_memory" if self.device_memory is not None else "stream" if self.stream else None


class PlacementOptions(Struct, frozen=True, kw_only=True):
    """What decides which consecutive stages a device gets, besides the devices themselves; see `stagepack.load`."""

    memory: Annotated[
        Sequence[int | str],
        Option(
            "--memory SIZE",
            "Memory of each device, in order, such as 24GiB: it gets no more stages than fit. Repeatable.",
            default_text="no limit",
        ),
    ] = ()
    speeds: Annotated[
        Sequence[float],
        Option(
            "--speed FACTOR",
            "Speed of each device, in order, relative to the others. Repeatable.",
            default_text="all are equal",
        ),
    ] = ()
    profiles: Annotated[
        Sequence[str],
        Option(
            "--profile [D=]DEVICE|FILE",
            "Times of the device D, of a kind of devices such as cuda, or of all: a file of 'stagepack profile', or a device that "
            "'stagepack plan' knows, such as h100. Repeatable.",
            default_text="those of the bundle's plan",
        ),
    ] = ()
    links: Annotated[
        Sequence[str],
        Option(
            "--link LINK",
            "Speed at which values are sent, such as host=25GB/s,rtt=0.1ms between hosts, or device=64GB/s within one. Repeatable.",
            default_text="25 GB/s",
        ),
    ] = ()
    stages_per_device: Annotated[
        Sequence[int],
        Option(
            "--placement COUNTS", "Number of stages of each device, in order, such as 4,3,1.", default_text="chosen"
        ),
    ] = ()

    def __post_init__(self) -> None:
        """Check that each option is a list of what it is to have."""
        types = {"memory": int | str, "speeds": int | float, "profiles": str, "links": str, "stages_per_device": int}
        for option_name, item_type in types.items():
            values = getattr(self, option_name)
            if isinstance(values, str | bytes) or not isinstance(values, Sequence):
                raise OptionError(f"{option_name}: expected a list, found {values!r}")
            for value in values:
                if not isinstance(value, item_type) or isinstance(value, bool):
                    expected = getattr(item_type, "__name__", str(item_type))
                    raise OptionError(f"{option_name}: expected items of {expected}, found {value!r}")

    @property
    def is_given(self) -> bool:
        """Whether the caller says more than which devices there are."""
        return any(structs.astuple(self))


class LoadOptions(WeightOptions, frozen=True, kw_only=True):
    """How stages are loaded, in this process or in others; `modules` is for one stage alone. See `stagepack.load`."""

    devices: Annotated[
        Sequence[Any],
        Option(
            "--device DEVICE",
            "Device for each stage, in order; with fewer devices, consecutive stages are joined. Such as cpu, cuda or cuda:1; auto: those "
            "of this machine that help. Repeatable.",
        ),
    ] = ("cpu",)
    runtime: Annotated[
        str | Sequence[str],
        Option(
            "--runtime NAME",
            "Runtime that executes the stages: one for all stages, or one for each stage in order. Repeatable. NAME is {runtimes}, a "
            "runtime that a module of --import registers, or auto: the first of them that is installed and that the bundle has files for.",
        ),
    ] = DEFAULT_RUNTIME
    allow_ops: Annotated[
        Collection[str],
        Option(
            "--allow-ops NAME",
            "Allow these operators to run: a namespace of custom ones, or one of ATen or prims that does not run by default. Repeatable.",
            default_text="none",
        ),
    ] = ()
    verify: Annotated[
        Verify,
        Option(
            "--verify",
            "What is compared with the digests of the bundle. full: every file that is read. manifest: all but the content of weight "
            "files. off: only the manifest. The rules of the format are checked in any case.",
        ),
    ] = "full"
    compile: Annotated[
        Compile,
        Option(
            "--compile",
            "Compile with torch.compile at the first call: regions compiles each distinct region once, whole each stage. Without a value: "
            "regions.",
            default_text="off",
        ),
    ] = False
    compiled: Annotated[
        str | None,
        Option(
            "--compiled FOLDER",
            "Run the native code in this folder, written by 'stagepack compile'. The code is executed as it is: use only folders that you "
            "trust.",
            default_text="off",
        ),
    ] = None
    adapters: Annotated[
        Sequence[str] | None,
        Option(
            "--adapter FOLDER",
            "Load this adapter, written by 'stagepack adapter', over the weights of the bundle: FOLDER, a URL, or NAME=FOLDER, each with "
            "@sha256:DIGEST to refuse another one. Requests choose it by its name. Repeatable.",
            default_text="none",
        ),
    ] = None
    placement: PlacementOptions = PlacementOptions()
    modules: bool = False

    def __post_init__(self) -> None:
        """Check what callers give, before anything is read."""
        if self.compile not in (False, True, "regions", "whole"):
            raise OptionError(f"compile: expected False, True, 'regions' or 'whole', found {self.compile!r}")
        if self.compile and self.compiled is not None:
            raise OptionError("compile and compiled exclude each other: give one of them")
        if self.modules and self.compiles:
            raise OptionError("modules excludes compile and compiled: a stage that runs by its modules is not compiled")
        if self.device_memory is not None:
            try:
                structs.force_setattr(self, "device_memory", parse_byte_size(self.device_memory))
            except ValueError as error:
                raise OptionError(f"device_memory: {error}") from None
        if self.adapters is not None:
            for excluded in ("compiled", "modules"):
                if getattr(self, excluded) not in (False, None):
                    raise OptionError(f"adapters excludes {excluded}: leave out one of them, or merge the adapter")
        if self.arriving is not None:
            for excluded in ("compile", "compiled", "copy", "modules", "stream"):
                if excluded != self.arriving and getattr(self, excluded) not in (False, None):
                    raise OptionError(f"{self.arriving} excludes {excluded}: leave out one of them")

    @property
    def compiles(self) -> bool:
        """Whether stages run compiled."""
        return self.compile is not False or self.compiled is not None

    @property
    def verifies_weights(self) -> bool:
        """Whether the bytes of weight files are compared with their digests."""
        return self.verify == "full"


AUTO: Final = "auto"


def device_list(devices: Any, device: Any = None) -> list[Any]:
    """Return the devices that a caller names: one, or several, or in the way of other libraries as `device`; the CPU by default."""
    if device is not None:
        if devices is not None:
            raise OptionError("device, devices: expected one of them: device is that of all stages")
        devices = device
    if devices is None:
        return ["cpu"]
    return list(devices) if isinstance(devices, Sequence) and not isinstance(devices, str) else [devices]


def adapter_list(adapters: Any) -> list[str] | None:
    """Return the adapters that a caller gives, in a list or by name, as texts for `NamedAdapter.parse`; None for None."""
    if adapters is None:
        return None
    if isinstance(adapters, Mapping):
        for name in adapters:  # with "=" in it, a part of it would be the name
            check_adapter_name(name)
        return [f"{name}={adapter_text(adapter)}" for name, adapter in adapters.items()]
    if isinstance(adapters, str | bytes) or not isinstance(adapters, Sequence):
        raise OptionError(f"adapters: expected a list of folders, or a dict of folders by name, found {adapters!r}")
    return [adapter_text(adapter) for adapter in adapters]


def adapter_text(adapter: Any) -> str:
    """Return the text for `stagepack.named_adapters.NamedAdapter` of an adapter that a caller gives."""
    if isinstance(adapter, OpenAdapter):
        return f"{opening_location(adapter)}@sha256:{adapter.digest}"
    if not isinstance(adapter, str | os.PathLike):
        raise OptionError(f"adapters: expected the folder or URL of an adapter, found {adapter!r:.100}")
    return os.fspath(adapter)


def folder_name(compiled: str | os.PathLike[str] | None) -> str | None:
    """Return the name of a folder that a caller names."""
    return None if compiled is None else os.fspath(compiled)


class ProcessOptions(Struct, frozen=True, kw_only=True):
    """How the processes of a pipeline run; `start_seconds` is how long to wait for them to come. See `stagepack.load`."""

    imports: Annotated[
        Sequence[str],
        Option(
            "--import MODULE",
            "Import this Python module first, such as one that registers custom operators or a runtime. Repeatable.",
            default_text="none",
        ),
    ] = ()
    max_restarts: Annotated[
        int,
        Option(
            "--max-restarts N",
            "With --processes: how often within an hour the processes of a model are started again after one of them was lost. Then the "
            "server ends.",
        ),
    ] = 0
    on_loss: Annotated[
        OnLoss,
        Option(
            "--on-loss",
            "With --max-restarts: restart starts the same processes again after one was lost; regroup places the stages on those that are "
            "left, and leaves the device of the lost one out.",
        ),
    ] = "restart"
    in_flight: int = DEFAULT_IN_FLIGHT
    microbatch_size: int | None = None
    start_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Check what callers give, before a process is started."""
        if isinstance(self.imports, str):
            raise OptionError(f"imports: expected a sequence of modules, found {self.imports!r}")
        if self.on_loss not in get_args(OnLoss):
            raise OptionError(f"on_loss: expected 'restart' or 'regroup', found {self.on_loss!r}")
        if self.on_loss == "regroup" and self.max_restarts == 0:
            raise OptionError("on_loss: 'regroup' starts processes again: expected max_restarts of at least 1, found 0")
        for option_name, value, least in (
            ("in_flight", self.in_flight, 1),
            ("max_restarts", self.max_restarts, 0),
            ("microbatch_size", 1 if self.microbatch_size is None else self.microbatch_size, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise OptionError(f"{option_name}: expected a number of at least {least}, found {value!r}")
        if not self.start_seconds > 0:
            raise OptionError(f"start_seconds: expected more than 0 seconds, found {self.start_seconds!r}")


def refuse_process_options(**options: object) -> None:
    """Refuse options that only stages in processes of their own have; each has a value that is false where nobody asks for it."""
    for option_name, value in options.items():
        if value:
            raise OptionError(f"{option_name}: only stages in processes of their own have it: give processes=True")
