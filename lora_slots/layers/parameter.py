"""Slots for a parameter that a module reads by itself: the module sees it with the adapters' share.

Some modules never call a layer: they read a weight and do the rest on their own. There, the swapped
class answers for the attribute with the parameter plus what the active adapters add to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lora_slots.layers import watch
from lora_slots.layers.base import SlotLayer, SlotSizes
from lora_slots.layers.kind import LayerKind


class ParameterSlots(nn.ModuleDict):
    """The slot layers of a module's parameters, by the name of the parameter."""


class FullSlots(SlotLayer):
    """A parameter as each slot would have it, in full size.

    Attributes:
        full: ``[num_slots, numel]``, the flattened parameter of each slot.
        holds: ``[num_slots, 1]`` float32, 1 for each slot whose adapter has the parameter, else 0.
    """

    full: Tensor
    holds: Tensor

    def __init__(self, numel: int, sizes: SlotSizes) -> None:
        """Allocate zeros: nothing loaded means the parameter is the base model's."""
        super().__init__()
        vars(self)["mix"] = sizes.mix
        self.add_buffer("full", sizes.num_slots, numel, sizes)
        self.add_buffer("holds", sizes.num_slots, 1, sizes)

    def forward(self, parameter: Tensor) -> Tensor:
        """``parameter + sum over slots of weight * (full - parameter)``, exact at weights 0 and 1.

        Args:
            parameter: The base model's, of any shape; not changed.

        Returns:
            The same shape and dtype.
        """
        if not torch.compiler.is_compiling():
            watch.notify(self)
        weights = self.holds * self.mix.of_slots(self.holds.device).t()
        own = (weights * self.full).sum(0)
        rest = (1 - weights.sum(0)) * parameter.flatten()
        return (rest + own).view(parameter.shape).to(parameter.dtype)


def full_kind(parameter: str) -> LayerKind:
    """How any module takes another tensor in the place of its own parameter of this name."""
    return parameter_kind(parameter, has_parameter, _full_shape, _full_slots)


def parameter_kind(
    parameter: str,
    matches: Callable[..., bool],
    shape: Callable[..., tuple[tuple[int, ...], int]],
    make: Callable[..., SlotLayer],
) -> LayerKind:
    """A kind whose functions take the name of the parameter as ``name`` beside the module."""
    return LayerKind(
        name="parameter",
        matches=partial(matches, name=parameter),
        shape=partial(shape, name=parameter),
        make=partial(make, name=parameter),
        weight=partial(own_parameter, name=parameter),
    )


def has_parameter(module: nn.Module, name: str) -> bool:
    """Whether ``module`` itself has a floating-point parameter of this name."""
    parameter = module._parameters.get(name)
    return parameter is not None and parameter.is_floating_point() and parameter.itemsize > 1


def own_parameter(module: nn.Module, name: str) -> Tensor:
    """The parameter ``name`` of ``module`` as it is, without the share of any slots."""
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def _full_shape(module: nn.Module, name: str) -> tuple[tuple[int, ...], int]:
    return (), own_parameter(module, name).numel()


def _full_slots(module: nn.Module, sizes: SlotSizes, name: str) -> FullSlots:
    return FullSlots(own_parameter(module, name).numel(), sizes)


def effective(module: nn.Module, name: str) -> Tensor:
    """The parameter ``name`` of ``module`` with the share of its slots.

    Eagerly, it is computed once for each call of the module, however often it is read there.
    """
    slots = module._modules["lora_slots"]
    assert isinstance(slots, ParameterSlots)
    parameter = own_parameter(module, name)
    if torch.compiler.is_compiling():
        return slots[name](parameter)  # type: ignore[no-any-return]
    known = _memory.known.get(id(module), {})
    if name not in known:
        known[name] = slots[name](parameter)
    return known[name]


class _Memory(threading.local):
    def __init__(self) -> None:
        self.known: dict[int, dict[str, Tensor]] = {}


_memory = _Memory()


@contextmanager
def one_call(module: nn.Module) -> Iterator[None]:
    """Compute the parameters of ``module`` at most once in this thread until this is left."""
    if id(module) in _memory.known:
        yield
        return
    _memory.known[id(module)] = {}
    try:
        yield
    finally:
        del _memory.known[id(module)]
