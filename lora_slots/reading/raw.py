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
        configs: The config of each component, where a file for a pipeline has several; then
            ``config`` is None. A component's name begins the names of its tensors; the config
            speaks of modules without it.
        format: The name of the format, such as ``PEFT`` or ``kohya``.
    """

    source: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    format: str = "PEFT"

    def with_config(self, config: Mapping[str, Any]) -> RawAdapter:
        """The same tensors under another config, which is for all of them."""
        return replace(self, config=config, configs={})

    def component_of(self, module: str) -> str:
        """The component in ``configs`` that a module of the file belongs to, or ``""``."""
        if not self.configs:
            return ""
        name = module.removeprefix("module.")
        return next((c for c in self.configs if name.startswith(f"{c}.")), "")

    def config_of(self, module: str) -> Mapping[str, Any] | None:
        """The config that speaks of a module of the file, if one does."""
        return self.configs.get(self.component_of(module), self.config)

    @property
    def all_configs(self) -> tuple[Mapping[str, Any], ...]:
        """Every config: one for each component, the only one, or none."""
        return (*self.configs.values(), *([] if self.config is None else [self.config]))

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
