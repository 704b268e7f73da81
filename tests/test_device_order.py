"""On a GPU the work itself is in order, whichever threads gave it and whenever it is run.

A stand-in for `torch.cuda` writes down what each stream is given, and what it waits for; the order
that these add up to is what is looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Snapshot, toy, toy_adapter, toy_input

from lora_slots import SlotManager
from lora_slots.bank import buffers
from lora_slots.bank.ordering import Order, Orders
from lora_slots.bank.sharing import MixWriter
from lora_slots.staging.copying import sent

CPU = torch.device("cpu")


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.last: int | None = None

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.give(self, "wait", after=event.work)


class FakeEvent:
    def __init__(self) -> None:
        self.work: int | None = None

    def record(self, stream: FakeStream) -> None:
        self.work = stream.last

    def query(self) -> bool:
        return False


class FakeCuda:
    """What streams are given, by number, and what each piece of work comes after."""

    def __init__(self) -> None:
        self.work: list[tuple[str, set[int]]] = []
        self.current = self.default = FakeStream(self)
        self.Event = FakeEvent

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def give(self, stream: FakeStream, what: str, after: int | None = None) -> int:
        known = {work for work in (stream.last, after) if work is not None}
        self.work.append((what, known.union(*(self.work[w][1] for w in known))))
        stream.last = len(self.work) - 1
        return stream.last

    def run(self, what: str) -> int:
        return self.give(self.current, what)

    def numbers(self, what: str) -> list[int]:
        return [number for number, (name, _) in enumerate(self.work) if name == what]

    def comes_after(self, later: int, earlier: int) -> bool:
        return earlier in self.work[later][1]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """What writes into slots is work of the current stream."""
    cuda = FakeCuda()

    def noted(what, func, *args):
        cuda.run(what)
        return func(*args)

    for owner, name, what in (
        (buffers, "copy_bits", "rows"),
        (buffers, "zero_bits", "rows"),
        (MixWriter, "write", "steering"),
    ):
        func = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            partial(noted, what, func)
            if owner is buffers
            else lambda *args, func=func, what=what: noted(what, func, *args),
        )
    return cuda


def manager_on(cuda: FakeCuda, **options) -> tuple[torch.nn.Module, SlotManager]:
    model = toy()
    manager = SlotManager(model, max_rank=8, **options)
    manager._bank.orders._by_device = {CPU: Order(CPU, cuda)}
    return model, manager


def forward(cuda: FakeCuda, manager: SlotManager, stream: FakeStream) -> int:
    with cuda.stream(stream), manager.hold():
        return cuda.run("forward")


def new_work(cuda: FakeCuda, what: str, change) -> list[int]:
    before = len(cuda.work)
    change()
    return [number for number in cuda.numbers(what) if number >= before]


def test_what_forwards_notice_is_written_after_those_before_and_before_those_after(cuda):
    _, manager = manager_on(cuda, num_slots=2)
    streams = [FakeStream(cuda) for _ in range(3)]
    changes = [
        lambda: manager.load(toy_adapter(4, seed=1), "a"),
        lambda: manager.load(toy_adapter(8, seed=2), "a"),
        lambda: manager.set_weight("a", 0.5),
        lambda: manager.load(toy_adapter(2, seed=3), "b"),
        lambda: manager.unload("a"),
        lambda: manager.disable_adapters(),
    ]
    for change in changes:
        earlier = [forward(cuda, manager, stream) for stream in streams]
        steering = new_work(cuda, "steering", change)
        later = [forward(cuda, manager, stream) for stream in streams]
        assert steering
        assert all(itertools.starmap(cuda.comes_after, itertools.product(steering, earlier)))
        assert all(itertools.starmap(cuda.comes_after, itertools.product(later, steering)))


def test_rows_that_no_forward_notices_are_copied_beside_them_and_before_they_are_used(cuda):
    _, manager = manager_on(cuda, num_slots=2)
    manager.load(toy_adapter(4, seed=1), "a")
    stream = FakeStream(cuda)
    running = forward(cuda, manager, stream)
    rows = new_work(cuda, "rows", lambda: manager.load(toy_adapter(4, seed=2), "b", activate=False))
    assert rows
    assert not any(cuda.comes_after(number, running) for number in rows)
    manager.set_adapters("b")
    used = forward(cuda, manager, stream)
    assert all(cuda.comes_after(used, number) for number in rows)


def test_rows_in_use_are_written_after_the_forwards_that_use_them(cuda):
    _, manager = manager_on(cuda, num_slots=1)
    manager.load(toy_adapter(4, seed=1), "a")
    running = forward(cuda, manager, FakeStream(cuda))
    rows = new_work(cuda, "rows", lambda: manager.load(toy_adapter(4, seed=2), "a"))
    assert all(cuda.comes_after(number, running) for number in rows)


def test_rows_that_were_given_up_are_not_written_before_who_used_them_is_done(cuda):
    _, manager = manager_on(cuda, num_slots=2)
    manager.load(toy_adapter(4, seed=1), "a")
    running = forward(cuda, manager, FakeStream(cuda))
    rows = new_work(cuda, "rows", lambda: manager.unload("a"))
    rows += new_work(cuda, "rows", lambda: manager.load(toy_adapter(8, seed=2), "b"))
    assert len(rows) >= 2
    assert all(cuda.comes_after(number, running) for number in rows)


@pytest.mark.parametrize("at", range(6))
def test_what_puts_a_failed_write_back_comes_after_it(cuda, monkeypatch, at):
    model, manager = manager_on(cuda, num_slots=2)
    manager.load(toy_adapter(4, seed=1), "a")
    manager.load(toy_adapter(4, seed=2), "b")
    before, count = Snapshot.of(manager, model), itertools.count()
    copy, zero = buffers.copy_bits, buffers.zero_bits

    def failing(func, *args):
        func(*args)
        if next(count) == at:
            raise RuntimeError("fault")

    with monkeypatch.context() as patched:
        patched.setattr(buffers, "copy_bits", partial(failing, copy))
        patched.setattr(buffers, "zero_bits", partial(failing, zero))
        start = len(cuda.work)
        try:
            manager.load(toy_adapter(8, seed=3), "b")
        except RuntimeError:
            before.assert_unchanged(manager, model)
        rows = [number for number in cuda.numbers("rows") if number >= start]
    last = forward(cuda, manager, FakeStream(cuda))
    manager.set_weight("b", 1.0)
    assert all(cuda.comes_after(b, a) for a, b in itertools.pairwise(rows))
    assert cuda.comes_after(cuda.numbers("steering")[-1], last)


def test_a_forward_that_does_not_hold_is_not_waited_for_in_another_stream(cuda):
    """The twin: what the tests above see comes from `hold`."""
    _, manager = manager_on(cuda, num_slots=1)
    with cuda.stream(FakeStream(cuda)):
        running = cuda.run("forward")
    steering = new_work(cuda, "steering", lambda: manager.load(toy_adapter(4, seed=1), "a"))
    assert not any(cuda.comes_after(number, running) for number in steering)


def test_only_gpus_are_ordered():
    orders = Orders()
    orders.cover({CPU, torch.device("meta")})
    assert not orders
    model = toy()
    manager = SlotManager(model, max_rank=8)
    hold = manager._lock.hold()
    assert manager._bank.orders.forwards(hold) is hold


class Copies(TorchDispatchMode):
    """Counts copies from one device to another."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_tensors_of_one_block_are_sent_in_one_copy_and_arrive_as_they_are():
    block = torch.arange(24.0).view(6, 4)
    rows = [*torch.split(block, [1, 3, 2]), torch.ones(2, 2), block[:, ::2].bfloat16()]
    there = sent(rows, CPU)
    assert all(map(torch.equal, there, rows))
    with Copies() as copies:
        sent(rows, torch.device("meta"))
    assert copies.count == 3
    clones = sent([row.clone() for row in rows], CPU)
    assert all(map(torch.equal, clones, rows))


def test_buffers_that_are_not_the_hosts_are_written_by_torch(monkeypatch):
    model, x = toy(), toy_input()
    manager = SlotManager(model, max_rank=8)
    monkeypatch.setattr(buffers, "homes", lambda known: {})
    manager.load(toy_adapter(8, seed=1))
    manager.load(toy_adapter(3, seed=2))
    output = model(x)
    monkeypatch.undo()
    plain = toy()
    SlotManager(plain, max_rank=8).load(toy_adapter(3, seed=2))
    assert torch.equal(output, plain(x))
