"""What a kind of base layer has to say about itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lora_slots.layers.base import SlotLayer, SlotSizes


def _as_in_the_file(module: Any, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    return A, B


@dataclass(frozen=True)
class LayerKind:
    """How one kind of base layer takes slots.

    Attributes:
        name: The class name users know it by.
        matches: Whether a module is of this kind.
        shape: Of a module of this kind, the axes of ``lora_A`` in a file but for the rank, such as
            ``(in,)``, and the size of its output.
        make: Makes the slot layer of a module. Its ``forward(x, y, module)`` returns ``y``, what
            the module made of ``x``, plus the adapters' share.
        weight: The weight of a module as ``[out, in]`` floats, dequantised; DoRA needs it. It
            raises `UnsupportedAdapterError` where a module can take no DoRA.
        is_linear: Whether PEFT's ``"all-linear"`` means it.
        whole: The ``lora_A [r, *in_shape]`` and ``lora_B [out, r]`` of a module for what a file
            has for it, where files may hold less: the shares of groups.
    """

    name: str
    matches: Callable[[nn.Module], bool]
    shape: Callable[[Any], tuple[tuple[int, ...], int]]
    make: Callable[[Any, SlotSizes], SlotLayer]
    weight: Callable[[Any], Tensor]
    is_linear: bool = False
    whole: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]] = _as_in_the_file


def runs_as(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether ``module`` is a ``cls`` that runs by its forward, and not by one of its own.

    A subclass's own may change the input or the weight before it calls ``cls``.
    """
    return isinstance(module, cls) and inspect.unwrap(type(module).forward) is cls.forward
