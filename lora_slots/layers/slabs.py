"""One piece of memory for the buffers of many slot layers that are alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lora_slots.layers.base import SlotLayer

# Buffers begin where vector instructions and caches like them to.
_ALIGNED = 64  # bytes


def allocate(layers: Sequence[SlotLayer], devices: Sequence[torch.device]) -> None:
    """Give the buffers of new slot layers, which are on ``meta``, memory that is zero.

    Buffers that agree in name, dtype, device and shape lie in one slab, one after the other, so
    that a run of their rows can be written in one strided copy.

    Args:
        layers: Whose buffers are replaced.
        devices: Where those of each layer shall be. On ``meta`` they stay as they are.
    """
    alike = defaultdict(list)
    for layer, device in zip(layers, devices, strict=True):
        for name, buffer in layer._buffers.items():
            if buffer is not None and device.type != "meta":
                alike[name, buffer.dtype, buffer.shape, device].append(layer)
    for (name, dtype, shape, device), members in alike.items():
        for layer, buffer in zip(members, _slab(len(members), shape, dtype, device), strict=True):
            layer._buffers[name] = buffer


def _slab(count: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """As many zero tensors of one shape, in one piece of memory."""
    nbytes = shape.numel() * dtype.itemsize
    step = -(-nbytes // _ALIGNED) * _ALIGNED // dtype.itemsize
    # Buffers made under inference_mode could not be written to outside of it.
    with torch.inference_mode(False):
        memory = torch.zeros(count * step, dtype=dtype, device=device)
        strides = (shape[1], 1)
        return [memory.as_strided(shape, strides, number * step) for number in range(count)]


class Share(NamedTuple):
    """A buffer as a pickle or a copy knows it: a part of memory that goes along once for all.

    Pickled by itself, a view would bring the memory of all along.
    """

    memory: Tensor
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, buffer: Tensor | None) -> Share | Tensor | None:
        """What stands for ``buffer``: itself where it is no part of more."""
        memory = None if buffer is None else buffer._base
        if buffer is None or memory is None or not _in(buffer, memory):
            return buffer
        return cls(memory, buffer.shape, buffer.stride(), int(buffer.storage_offset()))

    def buffer(self) -> Tensor:
        """The buffer again."""
        with torch.inference_mode(False):
            return self.memory.as_strided(self.shape, self.strides, self.offset)


def _in(buffer: Tensor, memory: Tensor) -> bool:
    """Whether it still is: assigning to ``.data`` changes that, and nothing that a view knows."""
    own, whole = buffer.untyped_storage(), memory.untyped_storage()
    return bool(own._cdata == whole._cdata)
