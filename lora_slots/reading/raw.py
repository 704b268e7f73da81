"""RawAdapter: what a file says, before any model has been asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class RawAdapter:
    """Tensors and config under the file's own names.

    Attributes:
        source: Where it was read from, for messages and reports.
        tensors: Every tensor of the file. Never written to.
        config: The content of ``adapter_config.json`` or its like; None where there is none.
        metadata: The free text in the header of a safetensors file.
    """

    source: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def with_config(self, config: Mapping[str, Any]) -> RawAdapter:
        """The same tensors under another config."""
        return replace(self, config=config)

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
