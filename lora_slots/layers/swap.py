"""Give a module slots by changing its class, and take them away again.

The new class derives from the module's own class and from nothing else, so ``isinstance``, state
dict keys, ``.weight`` and tying stay as they were. Unlike a hook, it is something Dynamo guards on.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from lora_slots.layers.base import SlotLayer
from lora_slots.layers.parameter import ParameterSlots, effective, one_call

CHILD_NAME = "lora_slots"


# A class, the names of the parameters that have slots (none: the layer itself has), and the
# subclass that runs them; and back.
_Origin = tuple[type[nn.Module], tuple[str, ...]]
_slot_classes: dict[_Origin, type[nn.Module]] = {}
_origins: dict[type[nn.Module], _Origin] = {}


def slot_class(cls: type[nn.Module], parameters: tuple[str, ...] = ()) -> type[nn.Module]:
    """The subclass of ``cls`` that also runs the slots; one per class and set of parameters.

    Its forward passes its result through the slots or, where ``parameters`` are named, sees those
    with the share of their slots.
    """
    origin = (cls, parameters)
    if origin not in _slot_classes:
        members = _parameter_members(cls, parameters) if parameters else _layer_members(cls)
        slotted = type(f"Slot{cls.__name__}", (cls,), members)
        copyreg.pickle(slotted, _reduce)
        _slot_classes[origin], _origins[slotted] = slotted, origin
    return _slot_classes[origin]


def _layer_members(cls: type[nn.Module]) -> dict[str, Any]:
    input_name = list(inspect.signature(cls.forward).parameters)[1]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else kwargs[input_name]
        y: Tensor = self.lora_slots(x, cls.forward(self, *args, **kwargs), self)
        return y

    return {"forward": functools.update_wrapper(forward, cls.forward)}


def _parameter_members(cls: type[nn.Module], parameters: tuple[str, ...]) -> dict[str, Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return cls.forward(self, *args, **kwargs)
        with one_call(self):
            return cls.forward(self, *args, **kwargs)

    def reader(name: str) -> property:
        return property(lambda self: effective(self, name))

    return {"forward": functools.update_wrapper(forward, cls.forward)} | {
        name: reader(name) for name in parameters
    }


def _reduce(module: nn.Module) -> tuple[Any, ...]:
    """Pickle and copy a slotted module by its base class: its own class has no import path."""
    make, args, *state = cast("tuple[Any, ...]", module.__reduce_ex__(4))
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        return (_new, (_origins[type(module)], *args[1:]), *state)
    return (make, args, *state)


def _new(origin: _Origin, *args: Any) -> nn.Module:
    slotted = slot_class(*origin)
    return slotted.__new__(slotted, *args)


def add_slots(module: nn.Module, slots: SlotLayer, parameter: str = "") -> None:
    """Swap the class of ``module`` and make ``slots`` its child, or that of one parameter's."""
    if parameter:
        child = module._modules.setdefault(CHILD_NAME, ParameterSlots())
        assert isinstance(child, ParameterSlots)
        # As an item, it could not have the name of a method, such as "keys".
        child._modules[parameter] = slots
        cls, _ = _origins.get(type(module), (type(module), ()))
        module.__class__ = slot_class(cls, tuple(child))
    else:
        module.__class__ = slot_class(type(module))
        module._modules[CHILD_NAME] = slots
    _rebind_instance_forward(module)


def remove_slots(module: nn.Module) -> None:
    """Undo `add_slots`."""
    module.__class__ = _origins[type(module)][0]
    del module._modules[CHILD_NAME]
    _rebind_instance_forward(module)


def has_slots(module: nn.Module) -> bool:
    """Whether `add_slots` was called on ``module`` and not undone."""
    return isinstance(module._modules.get(CHILD_NAME), SlotLayer | ParameterSlots)


def has_other_class(module: nn.Module) -> bool:
    """Whether something changed the class of a module after it got its slots."""
    return type(module) not in _origins


def has_foreign_forward(module: nn.Module) -> bool:
    """Whether a ``forward`` of unknown origin sits on the instance, where it hides the class's.

    accelerate's hooks do that too, but keep the original in ``_old_forward``, which can be renewed.
    """
    attributes = vars(module)
    forward = attributes.get("_old_forward" if "_hf_hook" in attributes else "forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def _rebind_instance_forward(module: nn.Module) -> None:
    """Point what accelerate stored on the instance at the forward of the new class."""
    attributes = vars(module)
    bound = type(module).forward.__get__(module)
    if "_hf_hook" in attributes:
        attributes["_old_forward"] = bound
    else:
        attributes.pop("forward", None)
