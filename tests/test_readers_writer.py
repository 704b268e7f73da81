"""The lock behind hold(): shared, reentrant, fair to both sides, and never left locked."""

from __future__ import annotations

import copy
import pickle
import random
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from threads import LIMIT, Task, together, wait_until, waits

from lora_slots import HoldError
from lora_slots.holding import HoldLock


@pytest.fixture
def lock() -> HoldLock:
    return HoldLock()


@pytest.fixture
def many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Holder:
    """A thread that holds until it is told to leave."""

    def __init__(self, lock: HoldLock) -> None:
        self.lock = lock
        self.inside = threading.Event()
        self.leave = threading.Event()
        self.again = threading.Event()
        self.task = Task(self._run)

    def _run(self) -> None:
        with self.lock.hold():
            self.inside.set()
            assert self.leave.wait(LIMIT)
            with self.lock.hold():
                self.again.set()

    def done(self) -> None:
        self.leave.set()
        self.task.result()


def holder(lock: HoldLock) -> Holder:
    made = Holder(lock)
    assert made.inside.wait(LIMIT)
    return made


def changing(lock: HoldLock) -> None:
    with lock.changing():
        pass


def change(lock: HoldLock) -> Task:
    def run() -> None:
        with lock.changing():
            lock.alone(lambda: None)

    return Task(run)


def assert_free(lock: HoldLock) -> None:
    change(lock).result()
    holder(lock).done()


def test_threads_hold_together(lock):
    first, second = holder(lock), holder(lock)
    first.done()
    second.done()
    assert_free(lock)


def test_a_change_waits_for_all_holders_and_new_holders_wait_for_it(lock):
    first, second = holder(lock), holder(lock)
    changer = change(lock)
    wait_until(lambda: lock._closed)
    late = Holder(lock)
    first.done()
    assert waits(changer)
    assert not late.inside.is_set()
    second.done()
    changer.result()
    assert late.inside.wait(LIMIT)
    late.done()
    assert_free(lock)


def test_a_holder_may_hold_again_while_a_change_waits_for_it(lock):
    held = holder(lock)
    changer = change(lock)
    wait_until(lambda: lock._closed)
    held.leave.set()
    assert held.again.wait(LIMIT)
    held.task.result()
    changer.result()


def test_a_nested_hold_ends_with_the_outermost(lock):
    with lock.hold():
        with lock.hold():
            changer = change(lock)
        assert waits(changer)
    changer.result()


def test_what_no_holder_can_notice_does_not_wait(lock):
    held = holder(lock)
    with lock.changing():
        other = Task(lambda: changing(lock))
        assert waits(other)
    other.result()
    held.done()


def test_changes_come_one_after_the_other(lock):
    inside = []

    def run() -> None:
        for _ in range(50):
            with lock.changing():
                inside.append(1)
                assert len(inside) == 1
                time.sleep(0)
                inside.pop()

    together(run, run, run)


def test_a_change_from_a_thread_that_holds_is_refused(lock):
    with lock.hold():
        with pytest.raises(HoldError, match="must not change inside hold"), lock.changing():
            pass
        with lock.hold(), pytest.raises(HoldError), lock.changing():
            pass
    assert_free(lock)


def test_a_change_inside_a_change_is_refused(lock):
    def change() -> None:
        with pytest.raises(HoldError, match="changing them already"):
            lock.changing()
        with lock.hold():  # but its forwards may hold
            pass

    with lock.changing():
        lock.alone(change)
    assert_free(lock)


class Mishap(BaseException):
    pass


def mishap() -> None:
    raise Mishap


def test_an_exception_inside_leaves_the_lock_free(lock):
    with pytest.raises(Mishap), lock.hold():
        mishap()
    assert_free(lock)
    with pytest.raises(Mishap), lock.changing():
        mishap()
    assert_free(lock)
    with pytest.raises(Mishap), lock.changing():
        lock.alone(mishap)
    assert_free(lock)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_is_free(lock, copied):
    with lock.hold():
        assert_free(copied(lock))


def test_neither_side_starves(lock, many_switches):
    end = time.monotonic() + 1.0
    counts = {"holds": [0] * 4, "changes": [0] * 3}

    def hold(number: int) -> None:
        while time.monotonic() < end:
            with lock.hold():
                counts["holds"][number] += 1
                time.sleep(0.001)  # all together, somebody always holds

    def change(number: int) -> None:
        while time.monotonic() < end:
            with lock.changing():
                lock.alone(lambda: None)
            counts["changes"][number] += 1

    together(*(lambda n=n: hold(n) for n in range(4)), *(lambda n=n: change(n) for n in range(3)))
    assert all(count > 20 for count in counts["holds"]), counts
    assert sum(counts["changes"]) > 20, counts
    assert_free(lock)


def test_no_holder_ever_sees_a_change_halfway(lock, many_switches):
    pair = [0, 0]
    end = time.monotonic() + 1.0

    def hold() -> None:
        while time.monotonic() < end:
            with lock.hold():
                before = tuple(pair)
                with lock.hold():
                    time.sleep(0)
                assert before == tuple(pair)
                assert pair[0] == pair[1]

    def both() -> None:
        pair[0] += 1
        time.sleep(0)
        pair[1] += 1

    def change() -> None:
        while time.monotonic() < end:
            with lock.changing():
                lock.alone(both)

    together(hold, hold, hold, change, change)
    assert pair[0] == pair[1] > 0


@pytest.mark.parametrize("side", ["hold", "change"])
def test_an_interrupted_wait_leaves_the_lock_free(lock, side):
    held = holder(lock)
    changer = change(lock)
    wait_until(lambda: lock._closed)
    waiting = changer
    if side == "hold":
        waiting = Task(lambda: lock.hold().__enter__())
        wait_until(lambda: lock._waiting)
    assert waiting.interrupt()
    with pytest.raises(KeyboardInterrupt):
        waiting.result()
    held.done()
    changer.thread.join(LIMIT)
    assert_free(lock)


# Where Python runs a callback of its own, it drops the interrupt.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_anywhere_leave_the_lock_free(lock, many_switches):
    dice = random.Random(0)

    def hold() -> None:
        while not over.is_set():
            with lock.hold(), lock.hold():
                pass

    def change() -> None:
        while not over.is_set():
            with lock.changing():
                lock.alone(lambda: None)

    interrupted = 0
    for _ in range(100):
        over = threading.Event()
        tasks = [Task(hold), Task(hold), Task(change), Task(change)]
        time.sleep(dice.random() * 0.003)
        for task in tasks:
            task.interrupt()
        over.set()
        for task in tasks:
            try:
                task.result()
            except (KeyboardInterrupt, RuntimeError):  # the latter where Condition.wait breaks off
                interrupted += 1
        del task, tasks
        assert_free(lock)
    assert interrupted > 200
