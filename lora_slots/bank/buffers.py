"""The buffers of all slot layers under one name, and copies of rows into them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lora_slots.bank.memory import Memory
from lora_slots.layers import SlotLayer
from lora_slots.staging.copying import for_each, sent
from lora_slots.staging.staged import Bits, StagedRows, as_bits

# How many arrays a thread copies before it asks for more.
_PIECE = 16


class Buffers:
    """The buffer of one name of every slot layer.

    On the host, numpy copies the rows, in the calling thread. torch has several threads share even
    a small copy, so that hundreds of them take as long as the one that is scheduled last.
    """

    def __init__(self, layers: Sequence[SlotLayer], name: str) -> None:
        """Look the buffers ``name`` of ``layers`` up when they are needed."""
        self._layers = layers
        self._name = name
        self._known = Memory()
        self._bits: list[Bits | None] = []

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles have buffers of their own."""
        return vars(self) | {"_known": Memory(), "_bits": []}

    def of(self, target: int) -> Tensor:
        """All rows of the buffer of one layer."""
        buffer = self._layers[target].whole(self._name)
        assert buffer is not None
        return buffer

    def copy(self, rows: StagedRows, starts: Sequence[int]) -> None:
        """Write ``rows``, those of each target from its row in ``starts`` on."""
        buffers, bits = self._look_up()
        into, values, bits_into, bits_values = [], [], [], []
        for target, start, value, value_bits in zip(
            rows.targets, starts, rows.rows, rows.bits, strict=True
        ):
            own = bits[target]
            buffer = buffers[target]
            assert buffer is not None
            if own is None or value_bits is None or buffer.dtype != value.dtype:
                into.append(buffer.narrow(0, start, value.shape[0]))
                values.append(value)
            else:
                bits_into.append(own[start : start + len(value_bits)])
                bits_values.append(value_bits)
        copy_bits(bits_into, bits_values)
        _copy_by_torch(into, values)
        _count([buffers[target] for target in rows.targets])

    def zero(self, targets: Sequence[int], firsts: Sequence[int], lasts: Sequence[int]) -> None:
        """Zero rows ``first : last`` of each target."""
        if not targets:
            return
        buffers, bits = self._look_up()
        into, bits_into = [], []
        for target, first, last in zip(targets, firsts, lasts, strict=True):
            own = bits[target]
            buffer = buffers[target]
            assert buffer is not None
            if own is None:
                into.append(buffer.narrow(0, first, last - first))
            else:
                bits_into.append(own[first:last])
        zero_bits(bits_into)
        if into:
            torch._foreach_zero_(into)
        _count([buffers[target] for target in targets])

    def _look_up(self) -> tuple[list[Tensor | None], list[Bits | None]]:
        """Every buffer, and its memory where that is the host's."""
        buffers = [layer.whole(self._name) for layer in self._layers]
        if not self._known.is_of(buffers):
            self._known = Memory(buffers)
            self._bits = [None if buffer is None else as_bits(buffer) for buffer in buffers]
        return buffers, self._bits


def copy_bits(into: Sequence[Bits], values: Sequence[Bits]) -> None:
    """Copy arrays into others of the same sizes."""
    pieces = range(0, len(into), _PIECE)
    nbytes = sum(value.nbytes for value in values)
    for_each(lambda first: _copy_some(into, values, first), pieces, nbytes)


def _copy_some(into: Sequence[Bits], values: Sequence[Bits], first: int) -> None:
    piece = slice(first, first + _PIECE)
    for own, value in zip(into[piece], values[piece], strict=True):
        own[:] = value


def _copy_by_torch(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, own in enumerate(into):
        by_device[own.device].append(index)
    for device, indices in by_device.items():
        there = sent([values[index] for index in indices], device)
        torch._foreach_copy_([into[index] for index in indices], there)


def zero_bits(into: Sequence[Bits]) -> None:
    """Fill arrays with zeros."""
    for own in into:
        own[:] = 0


def _count(buffers: Sequence[Tensor | None]) -> None:
    """Do as torch's own operations in place: autograd may have saved a buffer."""
    torch.autograd.graph.increment_version([buffer for buffer in buffers if buffer is not None])
