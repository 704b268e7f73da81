"""What a model offers to adapters, read-only: its target modules under every name they go by."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lora_slots.attach.components import parts_of, split_component
from lora_slots.layers import LayerKind, SlotLayer
from lora_slots.layers.parameter import ParameterSlots, own_parameter
from lora_slots.layers.quantized import stored_weight
from lora_slots.layers.swap import CHILD_NAME

# Names that torch.compile, FSDP and activation checkpointing put into a path. No model uses them.
WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# What DataParallel and DDP put there; a model may well have a real submodule of this name.
AMBIGUOUS_SEGMENT = "module"
PEFT_PREFIX = "base_model.model."


def spellings(path: str) -> tuple[str, ...]:
    """The names that ``path`` may stand for, the most literal first.

    >>> spellings("base_model.model._orig_mod.module.layers.0.q_proj")[-1]
    'layers.0.q_proj'
    """
    plain = without_wrappers(path)
    names = [path, plain, plain.removeprefix(PEFT_PREFIX)]
    if AMBIGUOUS_SEGMENT in plain and AMBIGUOUS_SEGMENT in plain.split("."):
        bare = _without(plain, {AMBIGUOUS_SEGMENT})
        names += [bare, bare.removeprefix(PEFT_PREFIX)]
    return tuple(dict.fromkeys(names))


def _lazily(path: str) -> Iterator[str]:
    yield from spellings(path)


def without_wrappers(path: str) -> str:
    """``path`` less what torch.compile, FSDP and checkpointing put into it."""
    return _without(path, WRAPPER_SEGMENTS) if "._" in f".{path}" else path


def _without(path: str, segments: frozenset[str] | set[str]) -> str:
    return ".".join(part for part in path.split(".") if part not in segments)


@dataclass(frozen=True, eq=False)
class Target:
    """One base layer that takes adapters.

    Attributes:
        path: Its first name in the model, without wrapper segments.
        aliases: All its names as the model spells them; more than one where the module is shared.
        kind: The kind of base layer.
        module: The base layer itself.
        in_shape: The axes of ``lora_A`` in a file but for the rank, such as ``(in,)``.
        out_features: The size of its output.
        parameter: The parameter of ``module`` that takes adapters, whose name then ends ``path``;
            empty where the layer as a whole does.
        component: The component of a pipeline that it belongs to, whose name then begins ``path``
            and ``aliases``; empty for a single model.
        in_encoder_layer: Whether an `nn.TransformerEncoderLayer` holds it, whose fast path reads
            ``weight`` and never calls the module.
        low_rank: Whether it takes low-rank updates, and not only ``token_rows``.
        token_rows: How many trained rows of an embedding each slot holds for it.
        tied_to: The embedding whose trained rows are its own, too, where their weights are tied.
    """

    path: str
    aliases: tuple[str, ...]
    kind: LayerKind
    module: nn.Module
    in_shape: tuple[int, ...]
    out_features: int
    parameter: str = ""
    component: str = ""
    in_encoder_layer: bool = False
    low_rank: bool = True
    token_rows: int = 0
    tied_to: nn.Module | None = None

    @property
    def path_in_component(self) -> str:
        """``path`` less the name of the component."""
        return self.path.removeprefix(f"{self.component}.")

    @property
    def in_features(self) -> int:
        """The size of a row of ``lora_A``."""
        return math.prod(self.in_shape)

    @property
    def slots(self) -> SlotLayer:
        """The slot layer; only where the module has been attached to."""
        child = self.module._modules[CHILD_NAME]
        return cast("SlotLayer", child[self.parameter] if self.parameter else child)  # type: ignore[index]

    @property
    def weight(self) -> Tensor:
        """The base weight, as the module stores it."""
        if self.parameter:
            # The attribute would answer with what the slots make of it.
            return own_parameter(self.module, self.parameter)
        return stored_weight(self.module)

    @property
    def is_full(self) -> bool:
        """Whether it takes whole tensors in the place of its parameter, not low-rank updates."""
        return bool(self.parameter) and not self.low_rank


@dataclass(frozen=True, eq=False)
class Layout:
    """The target modules of a model, in the order of the model.

    Attributes:
        targets: The target modules.
        others: The names of all other modules, each with the name of its class.
        model_name: The hub id or path that the model says it came from; empty if it says none.
    """

    targets: tuple[Target, ...]
    others: Mapping[str, str]
    model_name: str
    _model: nn.Module
    _index: Mapping[str, int | None]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        targets: tuple[Target, ...],
    ) -> Layout:
        """Index ``targets`` of ``model`` by every spelling of every name."""
        index: dict[str, int | None] = {}
        for number, target in enumerate(targets):
            for alias in target.aliases:
                for name in spellings(alias):
                    # A spelling of two modules stands for neither; a literal name wins.
                    known = index.setdefault(name, number)
                    if known != number:
                        index[name] = None
        for number, target in enumerate(targets):
            index.update(dict.fromkeys(target.aliases, number))
        aliases = {alias for target in targets if target.low_rank for alias in target.aliases}
        others = {
            name: type(module).__name__
            for path, module in named_modules(model)
            if path not in aliases
            for name in reversed(spellings(path))
        }
        return cls(targets, others, _name_of(model), model, index)

    def find(self, path: str) -> tuple[int, str] | None:
        """Match a module name from a file.

        Returns:
            The index of the target module and the spelling that matched, or None.
        """
        # Most names are literal but for PEFT's prefix; the full list is only made for the others.
        usual = (path, path.removeprefix(PEFT_PREFIX)) if "._" not in path else ()
        for name in itertools.chain(usual, _lazily(path)):
            index = self._index.get(name)
            if index is not None:
                return index, name
        return None

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of the model."""
        return self._model.parameters()

    def dtypes_of(self, component: str) -> Iterator[torch.dtype]:
        """The dtypes of the parameters of one component, in the order of the model."""
        for _, parameter in parts_of(self._model)[component].named_parameters():
            yield parameter.dtype

    def tensor(self, path: str) -> Tensor | None:
        """The model's own parameter or buffer that a key of a file names, or None."""
        for name in spellings(path):
            owner, _, own = name.rpartition(".")
            module = self.modules.get(owner) if owner else self._model
            if module is not None and own in module._parameters | module._buffers:
                return (module._parameters | module._buffers)[own]
        return None

    @functools.cached_property
    def modules(self) -> Mapping[str, nn.Module]:
        """All modules by every spelling of every name."""
        return {
            name: module
            for path, module in named_modules(self._model)
            for name in reversed(spellings(path))
        }

    def part(self, component: str) -> nn.Module:
        """One component of the model, to ask what it is; ``""`` for a single model."""
        return parts_of(self._model)[component]

    def has_module(self, path: str) -> bool:
        """Whether a name stands for a module of the model, a target or not."""
        return self.find(path) is not None or path in self.others

    def instances_of(self, class_names: Container[str]) -> Iterator[tuple[str, nn.Module]]:
        """The model, as ``""``, and its modules, by path, whose class or a base of it is so named.

        For their configs: nothing of them may be changed.
        """
        for path, module in itertools.chain([("", self._model)], named_modules(self._model)):
            if any(cls.__name__ in class_names for cls in type(module).__mro__):
                yield path, module

    @functools.cached_property
    def in_encoder_layers(self) -> tuple[Target, ...]:
        """The target modules that the fast path of an `nn.TransformerEncoderLayer` reads past."""
        return tuple(target for target in self.targets if target.in_encoder_layer)

    @functools.cached_property
    def components(self) -> tuple[str, ...]:
        """The names of the components that have target modules; ``("",)`` for a single model.

        One of whose target modules all belong to others, too, is among them.
        """
        names = (
            split_component(alias, self._model)[0]
            for target in self.targets
            for alias in target.aliases
        )
        return tuple(dict.fromkeys(names))

    def __len__(self) -> int:
        """The number of target modules."""
        return len(self.targets)

    def __iter__(self) -> Iterator[Target]:
        """Iterate over the target modules, in the order of the model."""
        return iter(self.targets)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every name of every module but the root and what slots have added."""
    for path, module in model.named_modules(remove_duplicate=False):
        if path and not isinstance(module, SlotLayer | ParameterSlots):
            yield path, module


def _name_of(model: nn.Module) -> str:
    config: Any = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None)
    return name if isinstance(name, str) else ""
