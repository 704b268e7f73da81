"""Fresh memory on the host, in large pages where the system has them."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

# Smaller blocks may come from memory that was freed before; larger ones malloc maps afresh.
# Source: mallopt(3), M_MMAP_THRESHOLD.
_WORTH_LARGE = 32 << 20
_LARGE = getattr(mmap, "MADV_HUGEPAGE", None)


def fresh(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory for ``numel`` elements, which holds anything.

    The system clears each page when it is first written to. In pages of 4 KB that can take longer
    than reading an adapter; in pages of 2 MB, which Linux gives to those who ask for them, less.

    Source: Linux, Documentation/admin-guide/mm/transhuge.rst.
    """
    nbytes = numel * dtype.itemsize
    if _LARGE is None or nbytes < _WORTH_LARGE:
        return torch.empty(numel, dtype=dtype, device="cpu")
    # Private: a forked process must not write to what this one puts back after an error.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        pages.madvise(_LARGE)
    return torch.frombuffer(pages, dtype=dtype)
