"""Which memory buffers have, to tell when it is no longer the same."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor


class Memory:
    """Some buffers and their memory.

    ``.to()`` and hooks put other tensors in their place. Assigning to ``.data``, ``set_`` and
    ``share_memory`` keep the tensor and replace, or even free, its memory.
    """

    def __init__(self, buffers: Sequence[Tensor] = ()) -> None:
        """Take note of what ``buffers`` have now."""
        self.buffers = list(buffers)
        self._places = _places(buffers)

    def is_of(self, buffers: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors with the same memory."""
        return (
            len(buffers) == len(self.buffers)
            and all(map(operator.is_, buffers, self.buffers))
            and _places(buffers) == self._places
        )


def _places(buffers: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, buffers))
