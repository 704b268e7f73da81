"""The buffers of all slot layers under one name, and copies of rows into them."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeGuard, cast

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

    def of(self, targets: Sequence[int]) -> list[Tensor]:
        """All rows of the buffers of some layers."""
        self._look_up()
        return [cast("Tensor", self._known.buffers[target]) for target in targets]

    def copy(self, rows: StagedRows, starts: Sequence[int]) -> None:
        """Write ``rows``, those of each target from its row in ``starts`` on."""
        buffers = self.of(rows.targets)
        bits = [self._bits[target] for target in rows.targets]
        places = list(zip(starts, map(operator.add, starts, rows.counts), strict=True))
        values = rows.bits
        as_staged = [buffer.dtype for buffer in buffers] == rows.dtypes
        if as_staged and _all_there(bits) and _all_there(values):
            copy_bits([own[a:b] for own, (a, b) in zip(bits, places, strict=True)], values)
        else:
            into = [own[a:b] for own, (a, b) in zip(buffers, places, strict=True)]
            _copy_by_torch(into, rows.rows)
        # As torch's own operations in place do: autograd may have saved a buffer.
        torch.autograd.graph.increment_version(buffers)

    def zero(self, targets: Sequence[int], firsts: Sequence[int], lasts: Sequence[int]) -> None:
        """Zero rows ``first : last`` of each target."""
        if not targets:
            return
        buffers = self.of(targets)
        bits = [self._bits[target] for target in targets]
        places = list(zip(firsts, lasts, strict=True))
        if _all_there(bits):
            zero_bits([own[a:b] for own, (a, b) in zip(bits, places, strict=True)])
        else:
            torch._foreach_zero_([own[a:b] for own, (a, b) in zip(buffers, places, strict=True)])
        torch.autograd.graph.increment_version(buffers)

    def _look_up(self) -> None:
        """Find every buffer, and its memory where that is the host's."""
        buffers = [layer.whole(self._name) for layer in self._layers]
        if not self._known.is_of(buffers):
            self._known = Memory(buffers)
            self._bits = [None if buffer is None else as_bits(buffer) for buffer in buffers]


def _all_there(bits: Sequence[Bits | None]) -> TypeGuard[Sequence[Bits]]:
    return not any(map(operator.is_, bits, itertools.repeat(None)))


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
