"""What the manager tells its user: frozen, and readable when printed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class LoadReport:
    """What a load did, or would do.

    Attributes:
        adapter_name: The name it is loaded under.
        slot: The slot it fills.
        source: Where it was read from.
        rank: Its largest rank.
        modules: The paths of the target modules it adapts, in the order of the model.
        skipped: Keys of the file that were not applied, each with the reason.
        scaling: alpha / r (or alpha / sqrt(r)) of every module, before any weight.
        nbytes: The size of what was copied, in bytes.
        seconds: How long it took, reading included.
        compressed: The modules that ``compress_to`` truncated, each with the relative error of its
            update in the Frobenius norm.
        cached: Whether it was on the host already, so that no file was read.
        evicted: The adapters that were unloaded to make room, those not used for longest first.
    """

    adapter_name: str
    slot: int
    source: str
    rank: int
    modules: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    scaling: Mapping[str, float]
    nbytes: int
    seconds: float
    compressed: Mapping[str, float] = field(default_factory=dict)
    cached: bool = False
    evicted: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line, one each for what was compressed and evicted, and one more per skipped key."""
        scaling = format_range(self.scaling.values())
        lines = [
            f"{self.adapter_name!r} in slot {self.slot} from {self.source}: rank {self.rank}, "
            f"scaling {scaling}, {len(self.modules)} modules, {format_size(self.nbytes)}, "
            f"{self.seconds * 1e3:.1f} ms"
        ]
        if self.compressed:
            worst = max(self.compressed, key=lambda module: self.compressed[module])
            lines.append(
                f"  compressed {len(self.compressed)} modules with a relative error of up to "
                f"{self.compressed[worst]:.2g}, at {worst}"
            )
        if self.evicted:
            lines.append(f"  evicted {', '.join(map(repr, self.evicted))}")
        lines += [f"  skipped {key}: {reason}" for key, reason in self.skipped]
        return "\n".join(lines)


@dataclass(frozen=True)
class ModuleShape:
    """The sizes of a base layer, as an adapter's tensors tell them.

    Attributes:
        in_shape: ``(in,)``, or ``(in, *kernel)`` for a convolution.
        out_features: The size of its output.
    """

    in_shape: tuple[int, ...]
    out_features: int

    @property
    def in_features(self) -> int:
        """The size of a row of ``lora_A``."""
        return math.prod(self.in_shape)

    def __str__(self) -> str:
        """The axes of both."""
        return f"in {'x'.join(map(str, self.in_shape))}, out {self.out_features}"


@dataclass(frozen=True)
class AdapterInfo:
    """What the header and the config of an adapter say, without a model.

    Attributes:
        source: Where it was read from.
        format: The family of its writer, such as ``"PEFT"`` or ``"kohya"``.
        base_model: The base model it names, or empty.
        ranks: The rank of every module, by the file's name for it less ``base_model.model.``. An
            upper bound where several projections are fused in one, since each may use only some of
            the rows.
        scaling: The scaling of every module.
        shapes: The sizes of every module's base layer.
        kinds: How many modules are of each kind, as far as shapes and names tell: ``"linear"``,
            ``"conv2d"``, ``"embedding"``, ...
        others: The shapes of whole parameters and of trained rows of embeddings that it has, by
            their names in the file.
        dtypes: The dtypes of its LoRA tensors.
        nbytes: The size of all its tensors in bytes.
        needs: The options of `SlotManager` that it needs beside ``max_rank``, such as ``{"dora":
            True}``.
        features: What is unusual about it, such as ``"rsLoRA"`` or ``"LoHa"``.
    """

    source: str
    format: str
    base_model: str
    ranks: Mapping[str, int]
    scaling: Mapping[str, float]
    shapes: Mapping[str, ModuleShape]
    kinds: Mapping[str, int]
    others: Mapping[str, tuple[int, ...]]
    dtypes: tuple[torch.dtype, ...]
    nbytes: int
    needs: Mapping[str, Any]
    features: tuple[str, ...]

    @property
    def max_rank(self) -> int:
        """The largest rank: what a SlotManager's ``max_rank`` must be at least."""
        return max(self.ranks.values(), default=0)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules it adapts."""
        return tuple(self.ranks)

    def __str__(self) -> str:
        """One line."""
        ranks = format_range(self.ranks.values())
        features = f", with {', '.join(self.features)}" if self.features else ""
        return (
            f"{self.source}: rank {ranks}, {len(self.ranks)} modules, {format_size(self.nbytes)}"
            f"{f', for {self.base_model}' if self.base_model else ''}{features}"
        )


def format_range(values: Iterable[float]) -> str:
    """The smallest and the largest value, or the one that all are."""
    values = list(values)
    low, high = min(values, default=0), max(values, default=0)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def format_size(nbytes: int) -> str:
    """Bytes as text."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.1f} GB"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"
