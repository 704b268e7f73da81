"""The guard that turns a recompile, or a silent fall back to eager, into an error."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import traceback
from collections.abc import Iterator, Mapping

import torch
import torch._dynamo
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.exc import RecompileError as DynamoRecompileError

from lora_slots.errors import RecompileError
from lora_slots.layers import SlotLayer
from lora_slots.layers.watch import listen
from lora_slots.layout import Layout

_OWN_CODE = tuple(os.path.join(os.path.dirname(file), "") for file in (torch.__file__, __file__))
_ROWS_DIFFER = re.compile(
    r"_buffers\['(lora_A|lora_B|scaling)'\]' size mismatch|\.(low_rank|idle) =="
)
_FAILED_GUARD = re.compile(r"^\s*- (?:\d+/\d+: )?(?P<guard>.+?)(?:\s+# .*)?$", re.MULTILINE)


@contextlib.contextmanager
def no_recompile(layout: Layout, *, allow_first: bool = False) -> Iterator[None]:
    """Raise where code is compiled, or compiled code is abandoned, in the calling thread.

    Args:
        layout: The target modules whose slots are watched.
        allow_first: Whether code that was never compiled may be compiled.

    Raises:
        RecompileError: A guard failed; compiled code fell back to eager; code was compiled for the
            first time where that was not allowed; or the storage of a slot's buffer changed.

    With ``rank_buckets`` or routing, ``allow_first`` lets every graph through: each number of rows
    is a first use to us and a recompile to Dynamo.
    """
    storage = _storage(layout)
    compiled: list[str] = []
    thread = threading.get_ident()

    def on_compile(args: CallbackArgs) -> None:
        if threading.get_ident() == thread and args.callback_trigger == CallbackTrigger.DYNAMO:
            compiled.append(_caller())

    def on_eager_run(layer: SlotLayer) -> None:
        # Dynamo leaves a callback in place for what a compiled call runs; False: it gave up on it.
        if get_eval_frame_callback() is not None:
            raise RecompileError(
                f"the slot of {_path_of(layer, layout)} ran eagerly inside a compiled call: "
                "Dynamo gave up on that code, most likely at "
                "torch._dynamo.config.recompile_limit; find what "
                'changes with TORCH_LOGS="recompiles", or raise the limit'
            )

    callback_handler.register_start_callback(on_compile)
    try:
        # To Dynamo, the first use of a number of rows is a recompile.
        strict = not (allow_first and any(_has_several_graphs(target.slots) for target in layout))
        with torch._dynamo.config.patch(error_on_recompile=strict), listen(on_eager_run):
            yield
    except DynamoRecompileError as error:
        raise _explained(error) from error
    finally:
        callback_handler.remove_start_callback(on_compile)
    if compiled and not allow_first:
        raise RecompileError(
            f"{len(compiled)} graphs were compiled where none may be, the first for "
            f"{compiled[0]}; run the model once before, or pass allow_first=True if it was never "
            "compiled"
        )
    _check_storage(storage, layout)


def _has_several_graphs(layer: SlotLayer) -> bool:
    return layer.shows_some or getattr(layer, "routes", None) is not None


def _explained(error: DynamoRecompileError) -> RecompileError:
    text = str(error)
    match = _FAILED_GUARD.search(text)
    guard = match["guard"].strip() if match else None
    what = text.splitlines()[0].strip()
    remedy = ""
    if _is_first_use(text):
        remedy = (
            "; if this is the first use of so many rows (rank_buckets), call manager.warmup(fn) "
            "before, or pass allow_first=True"
        )
    return RecompileError(f"{what}; the guard that failed: {guard}{remedy}", guard)


def _is_first_use(message: str) -> bool:
    """Whether compiled code was passed over because slots have another number of rows now."""
    guards = (match["guard"] for match in _FAILED_GUARD.finditer(message))
    return any(_ROWS_DIFFER.search(guard) for guard in guards)


def _caller() -> str:
    """The innermost line, outside of torch and of this package, that led to a compilation."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_OWN_CODE) and frame.filename != contextlib.__file__:
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "an unknown caller"


def _path_of(layer: SlotLayer, layout: Layout) -> str:
    return next((target.path for target in layout if target.slots is layer), "another model")


def _storage(layout: Layout) -> dict[str, tuple[int, torch.device]]:
    return {
        name: (buffer.data_ptr(), buffer.device) for name, buffer in _named_buffers(layout).items()
    }


def _named_buffers(layout: Layout) -> Mapping[str, Tensor]:
    buffers = {
        f"{target.path}.{name}": buffer
        for target in layout
        for name in target.slots._buffers
        if (buffer := target.slots.whole(name)) is not None
    }
    mixes = {target.slots.mix: f"{target.path}.mix" for target in layout}
    return buffers | {
        f"{name}.{kind}": buffer
        for mix, name in mixes.items()
        for kind, buffer in mix.named_buffers()
    }


def _check_storage(before: Mapping[str, tuple[int, torch.device]], layout: Layout) -> None:
    after = _storage(layout)
    moved = [name for name, place in before.items() if after.get(name) != place]
    if moved:
        raise RecompileError(
            f"the storage of {len(moved)} slot buffers changed, the first {moved[0]}; CUDA graphs "
            "would go on reading the old memory: move or cast the model before it is compiled"
        )
