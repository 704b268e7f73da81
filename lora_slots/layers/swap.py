"""Give a module slots by changing its class, and take them away again.

The new class derives from the module's own class and from nothing else, so ``isinstance``, state
dict keys, ``.weight`` and tying stay as they were. Unlike a hook, it is something Dynamo guards on.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from typing import Any, cast

from torch import Tensor, nn

from lora_slots.layers.base import SlotLayer

CHILD_NAME = "lora_slots"


# A class and its subclass with slots, and back.
_slot_classes: dict[type[nn.Module], type[nn.Module]] = {}
_base_classes: dict[type[nn.Module], type[nn.Module]] = {}


def slot_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``cls`` whose forward also runs the slots; one per class."""
    if cls not in _slot_classes:
        slotted = _make_slot_class(cls)
        _slot_classes[cls], _base_classes[slotted] = slotted, cls
    return _slot_classes[cls]


def _make_slot_class(cls: type[nn.Module]) -> type[nn.Module]:
    input_name = list(inspect.signature(cls.forward).parameters)[1]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else kwargs[input_name]
        y: Tensor = self.lora_slots(x, cls.forward(self, *args, **kwargs), self)
        return y

    functools.update_wrapper(forward, cls.forward)
    slotted = type(f"Slot{cls.__name__}", (cls,), {"forward": forward})
    copyreg.pickle(slotted, _reduce)
    return slotted


def _reduce(module: nn.Module) -> tuple[Any, ...]:
    """Pickle and copy a slotted module by its base class: its own class has no import path."""
    make, args, *state = cast("tuple[Any, ...]", module.__reduce_ex__(4))
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        return (_new, (_base_classes[type(module)], *args[1:]), *state)
    return (make, args, *state)


def _new(cls: type[nn.Module], *args: Any) -> nn.Module:
    slotted = slot_class(cls)
    return slotted.__new__(slotted, *args)


def add_slots(module: nn.Module, slots: SlotLayer) -> None:
    """Swap the class of ``module`` and make ``slots`` its child."""
    module.__class__ = slot_class(type(module))
    module._modules[CHILD_NAME] = slots
    _rebind_instance_forward(module)


def remove_slots(module: nn.Module) -> None:
    """Undo `add_slots`."""
    module.__class__ = _base_classes[type(module)]
    del module._modules[CHILD_NAME]
    _rebind_instance_forward(module)


def has_slots(module: nn.Module) -> bool:
    """Whether `add_slots` was called on ``module`` and not undone."""
    return isinstance(module._modules.get(CHILD_NAME), SlotLayer)


def has_other_class(module: nn.Module) -> bool:
    """Whether something changed the class of a module after it got its slots."""
    return type(module) not in _base_classes


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
