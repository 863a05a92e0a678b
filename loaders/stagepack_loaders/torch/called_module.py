"""The modules of the original model that a stage calls: each can be called on its own, and be replaced."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stagepack.errors import InputError
from stagepack_loaders.torch.container import Container, settle
from stagepack_loaders.torch.module_call import ModuleCallBody, pending_call
from stagepack_loaders.torch.slots import Slot

_BODIES = "stagepack.bodies"


class CalledModule(Container):
    """A module of the model. It is called as the model called it when it was captured.

    Inside its stage it is also passed the values that it uses and that were not among its arguments; on its own it runs without them
    where it can.
    """

    def __init__(self, bodies: Sequence[ModuleCallBody]) -> None:
        super().__init__()
        self.__dict__[_BODIES] = list(bodies)
        for body in bodies:
            body.module = self

    def _get_name(self) -> str:
        return self.__dict__[_BODIES][0].call.type.rpartition(".")[2] or type(self).__name__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        call = pending_call.get()
        if call is None or not any(call.body is body for body in self.__dict__[_BODIES]):
            body = self._fitting_body(args, kwargs)
            return body.run(body.bind(args, kwargs, {}))[1]
        pending_call.set(None)  # the modules inside have calls of their own
        call.outputs, result = call.body.run(call.body.bind(args, kwargs, call.values))
        return result

    def _fitting_body(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModuleCallBody:
        """The first call whose arguments fit, or else the first call: calls may differ in sizes that are fixed."""
        bodies: list[ModuleCallBody] = self.__dict__[_BODIES]
        for body in bodies if len(bodies) > 1 else ():
            try:
                body.bind(args, kwargs, {})
            except InputError:
                continue
            return body
        return bodies[0]


def called_modules(bodies: Iterable[ModuleCallBody]) -> list[tuple[str, CalledModule]]:
    """Return the modules that run calls, with their paths; a module comes before those inside it."""
    by_path: dict[str, list[ModuleCallBody]] = {}
    for body in bodies:
        by_path.setdefault(body.module_path, []).append(body)
    return [(path, CalledModule(by_path[path])) for path in sorted(by_path, key=lambda path: path.count("."))]


def connect(stage: Container, bodies: Sequence[ModuleCallBody], slots: Mapping[str, Slot]) -> None:
    """Connect calls with their stage and its weights, and tell containers which of their modules are called."""
    for body in bodies:
        body.stage = stage
        body.slots = [slots[value_name] for value_name in body.weights]
    for module in stage.modules():
        if isinstance(module, Container):
            settle(module, CalledModule)
