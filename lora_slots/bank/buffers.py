"""The buffers of all slot layers under one name, and copies of rows into them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lora_slots.bank.memory import Memory
from lora_slots.bank.places import Copies, Home, Tail, Zeroes, homes
from lora_slots.layers import SlotLayer
from lora_slots.layers.lora import BY_RANK
from lora_slots.recent import Recent
from lora_slots.staging.copying import for_each, sent
from lora_slots.staging.packing import Packing
from lora_slots.staging.staged import Bits, StagedRows

# From this many bytes on, torch's threads share the work; they are there already. Each of hundreds
# of small copies would take as long as the thread that is scheduled last: those are numpy's.
_WORTH_TORCH = 1 << 20
# Pairs of ranks, mostly, of adapters that take each other's place.
_MOST_ZEROES = 64
# Of a buffer with so many rows, the first that a slot owns.
Start = Callable[[int], int]


class Buffers:
    """The buffer of one name of every slot layer that has it.

    On the host, rows of buffers in one slab are copied together. Of ``scaling``, what counts as a
    row here is a column.
    """

    def __init__(self, layers: Sequence[SlotLayer], name: str) -> None:
        """Look the buffers ``name`` of ``layers`` up when they are needed."""
        self._layers = {
            target: layer for target, layer in enumerate(layers) if layer.whole(name) is not None
        }
        self._name = name
        self._forget()

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles have buffers of their own."""
        return {"_layers": self._layers, "_name": self._name}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Undo `__getstate__`."""
        vars(self).update(state)
        self._forget()

    def of(self, targets: Iterable[int]) -> list[Tensor]:
        """All rows of the buffers of some layers."""
        self._look_up()
        return [self._buffers[target] for target in targets]

    def copy(self, rows: StagedRows, start: Start) -> None:
        """Write ``rows``, into each buffer from the row on that ``start`` says."""
        self._look_up()
        copies = self._planned(rows)
        values = self._values.get(rows)
        if values is None:
            values = self._values[rows] = copies.values(rows)
        into = [
            own[:, (begin := start(own.shape[1])) : begin + value.shape[1]]
            for own, value in zip(copies.into, values, strict=True)
        ]
        copy_bits(into, values)
        # As torch's own operations in place do: autograd may have saved a buffer.
        torch.autograd.graph.increment_version(copies.counted)
        if copies.rest:
            self._copy_by_torch(copies.rest, rows, start)

    def zero(self, tails: tuple[Tail, ...], start: Start) -> None:
        """Zero rows of each of these targets, counted from the row that ``start`` says."""
        self._look_up()
        zeroes = self._zeroes.get(tails)
        if zeroes is None:
            zeroes = Zeroes.of(tails, self._homes)
            self._zeroes.put(tails, zeroes)
        into = [
            own[:, (begin := start(own.shape[1])) + first : begin + last]
            for own, first, last in zeroes.into
        ]
        zero_bits(into)
        torch.autograd.graph.increment_version(zeroes.counted)
        if zeroes.rest:
            self._zero_by_torch(zeroes.rest, start)

    def _zero_by_torch(self, tails: Iterable[Tail], start: Start) -> None:
        parts = []
        for target, first, last in tails:
            buffer = self._buffers[target]
            begin = start(buffer.shape[0])
            parts.append(buffer[begin + first : begin + last])
        torch._foreach_zero_(parts)

    def _planned(self, rows: StagedRows) -> Copies:
        # One plan for all that is packed alike.
        key = rows.packing or rows
        copies = self._copies.get(key)
        if copies is None:
            copies = self._copies[key] = Copies.of(rows, self._homes)
        return copies

    def _copy_by_torch(self, numbers: Sequence[int], rows: StagedRows, start: Start) -> None:
        by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for number in numbers:
            own, values = self._buffers[rows.targets[number]], rows.rows[number]
            begin = start(own.shape[0])
            by_device[own.device].append((own[begin : begin + values.shape[0]], values))
        for device, pairs in by_device.items():
            there = sent([values for _, values in pairs], device)
            torch._foreach_copy_([into for into, _ in pairs], there)

    def _forget(self) -> None:
        self._known = Memory()
        self._dicts = [layer._buffers for layer in self._layers.values()]
        self._buffers: Mapping[int, Tensor] = {}
        self._homes: Mapping[int, Home] = {}
        self._copies: WeakKeyDictionary[Packing | StagedRows, Copies] = WeakKeyDictionary()
        self._values: WeakKeyDictionary[StagedRows, Sequence[Bits]] = WeakKeyDictionary()
        self._zeroes: Recent[tuple[Tail, ...], Zeroes] = Recent(_MOST_ZEROES)

    def _look_up(self) -> None:
        """Find every buffer, and its memory where that is the host's."""
        # Unless forward sees a part of them, whole buffers are what it sees.
        seen = map(dict.get, self._dicts, itertools.repeat(self._name))
        if self._known.is_of(cast("list[Tensor]", list(seen))):
            return
        whole = [layer.whole(self._name) for layer in self._layers.values()]
        buffers = cast("list[Tensor]", whole)
        if not self._known.is_of(buffers):
            if self._known.buffers:
                # As after ``.to()``: others refer to what is gone, too.
                SlotLayer.generation += 1
            self._forget()
            axis = BY_RANK.get(self._name, 0)
            rows = [buffer.movedim(axis, 0) for buffer in buffers]
            self._buffers = dict(zip(self._layers, rows, strict=True))
            self._homes = homes(self._buffers)
            self._known = Memory(buffers)  # at last: not if anything above is interrupted


def copy_bits(into: Sequence[Bits], values: Sequence[Bits]) -> None:
    """Copy arrays into others of the same sizes."""
    small = []
    for pair in zip(into, values, strict=True):
        if pair[1].nbytes < _WORTH_TORCH:
            small.append(pair)
        else:
            own, value = map(torch.from_numpy, pair)
            own.copy_(value)
    for_each(_copy_pair, small, sum(value.nbytes for _, value in small))


def _copy_pair(pair: tuple[Bits, Bits]) -> None:
    own, value = pair
    own[:] = value


def zero_bits(into: Sequence[Bits]) -> None:
    """Fill arrays with zeros."""
    for own in into:
        if own.nbytes < _WORTH_TORCH:
            own[:] = 0
        else:
            torch.from_numpy(own).zero_()
