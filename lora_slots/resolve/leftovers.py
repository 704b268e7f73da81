"""Tensors of a file that are no low-rank updates, and what makes room for them."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lora_slots.errors import AdapterFileError, UnsupportedAdapterError
from lora_slots.layout import Layout
from lora_slots.reading import RawAdapter
from lora_slots.reading.keys import split_key
from lora_slots.resolve.naming import Naming, below
from lora_slots.resolve.settings import whole_tensor_features

_SAMPLES = 3
# What a part is added to.
_DIFFS = {"diff": "weight", "diff_b": "bias", "w_norm": "weight", "b_norm": "bias"}
# The parameters that ``bias=True`` makes room for.
_BIASES = ("bias", "in_proj_bias")
# What PEFT puts into the names of what it wraps, with and without the name of the adapter.
_WRAPPED = re.compile(r"\.base_layer(?=\.)|\.modules_to_save\.[^.]+(?=\.)")
_WRAPPED_UNNAMED = re.compile(r"\.base_layer(?=\.)|\.modules_to_save(?=\.)")


@dataclass(frozen=True, eq=False)
class Extra:
    """A tensor that is no low-rank update.

    Attributes:
        key: Its name in the file.
        module: The module as the file calls it; empty for the model itself.
        parameter: The parameter of the module, such as ``weight``.
        tensor: Its values.
        diff: How the file calls what is added to the parameter; empty for what takes its place.
        owner: The model's own path of the module; None where it has none.
        live: The model's own parameter or buffer, if it has one.
    """

    key: str
    module: str
    parameter: str
    tensor: Tensor
    diff: str
    owner: str | None
    live: Tensor | None

    @property
    def name(self) -> str:
        """The name of the parameter as the file would write it."""
        return below(self.module, self.parameter) if self.module else self.parameter

    @property
    def is_idle(self) -> bool:
        """Whether it changes nothing: it adds zeros, or is a copy of what the model has."""
        if self.diff:
            return not self.tensor.any()
        live = self.live
        if live is None or live.is_meta or live.shape != self.tensor.shape:
            return False
        return torch.equal(self.tensor.to(live.device, live.dtype), live)


def read_extra(key: str, tensor: Tensor, layout: Layout, naming: Naming) -> Extra:
    """Say what a tensor is for."""
    split = split_key(key)
    if split is not None and split[1] in _DIFFS:
        return _extra(key, (split[0], _DIFFS[split[1]]), tensor, split[1], layout, naming)
    names = (_WRAPPED.sub("", key), _WRAPPED_UNNAMED.sub("", key))
    owned = (name.rpartition(".")[::2] for name in names)
    extras = [_extra(key, each, tensor, "", layout, naming) for each in owned]
    return next((extra for extra in extras if extra.live is not None), extras[0])


def _extra(
    key: str, owned: tuple[str, str], tensor: Tensor, diff: str, layout: Layout, naming: Naming
) -> Extra:
    module, parameter = owned
    found = naming.module(module) if module else None
    if found is None:
        return Extra(
            key,
            module,
            parameter,
            tensor,
            diff,
            None,
            layout.tensor(f"{module}.{parameter}".strip(".")),
        )
    own = {**found[1]._parameters, **found[1]._buffers}
    return Extra(key, module, parameter, tensor, diff, found[0], own.get(parameter))


@dataclass
class Leftovers:
    """The tensors of a file that there is no room for.

    Attributes:
        raw: The file.
        layout: The model.
        naming: Finds the modules of the file.
        found: All names of modules in the file that the model has.
        others: Modules that take low-rank updates of other files.
        keys: The names of the tensors, by their kind.
        full_modules: The names that `SlotManager` would have to be given so as to make room.
        bias: Whether it would have to be given ``bias=True``.
    """

    raw: RawAdapter
    layout: Layout
    naming: Naming
    found: list[str]
    others: Collection[nn.Module] = ()
    keys: dict[str, list[str]] = field(default_factory=dict)
    full_modules: dict[str, None] = field(default_factory=dict)
    bias: bool = False

    @functools.cached_property
    def adapted(self) -> frozenset[nn.Module]:
        """The modules that take low-rank updates of the file."""
        matches = (self.naming.find(module) for module in self.found)
        targets = (self.layout.targets[match.target] for match in matches if match is not None)
        return frozenset(target.module for target in targets)

    def add(self, extra: Extra) -> None:
        """Note one, and what would make room for it."""
        self.keys.setdefault(_kind(extra), []).append(extra.key)
        module = None if extra.owner is None else self.layout.modules[extra.owner]
        if module is None or extra.key.endswith(".base_layer.weight"):
            return
        if extra.parameter in _BIASES and (module in self.adapted or module in self.others):
            self.bias = True
        elif extra.parameter in module._parameters and module not in self.adapted:
            self.full_modules[self._saved_name(extra)] = None

    def needs(self) -> dict[str, Any]:
        """The options of `SlotManager` that would make room."""
        needs: dict[str, Any] = {}
        if self.full_modules:
            needs["full_modules"] = tuple(self.full_modules)
        if self.bias:
            needs["bias"] = True
        return needs

    def check(self, extras: Sequence[Extra]) -> None:
        """Refuse a file with leftovers, or with features that it has no tensors for.

        Args:
            extras: All extras of the file.

        Raises:
            UnsupportedAdapterError: Names them, and what to do.
            AdapterFileError: Some tensors of a saved module are missing.
        """
        configs = self.raw.all_configs
        features = [feature for config in configs for feature in whole_tensor_features(config)]
        if not self.keys:
            known = [extra.module for extra in extras]
            features = [f for config in configs for f in self._without_tensors(config, known)]
        if not self.keys and not features:
            self._check_whole(extras)
            return
        kinds = [f"{len(keys)} {kind} ({_some(keys)})" for kind, keys in self.keys.items()]
        options = [
            f"{name}={list(value) if isinstance(value, tuple) else value}"
            for name, value in self.needs().items()
        ]
        remedy = f"build the SlotManager with {' and '.join(options)}, or " if options else ""
        raise UnsupportedAdapterError(
            f"{self.raw.source} asks for more than slots can hold: {'; '.join(features + kinds)}; "
            f"{remedy}pass strict=False to load its low-rank part without them"
        )

    def _check_whole(self, extras: Sequence[Extra]) -> None:
        """Refuse a file that has some parameters of a saved module, and not all."""
        names = [name for config in self.raw.all_configs for name in _saved(config)]
        given = {id(extra.live) for extra in extras if not is_replaced(extra.key)}
        owners = {extra.owner for extra in extras if extra.owner}
        paths = {path for owner in owners for path in _with_parents(owner)}
        for path in sorted(path for path in paths if path.endswith(tuple(names))):
            for parameter, live in self.layout.modules[path].named_parameters():
                if id(live) not in given:
                    raise AdapterFileError(
                        f"{self.raw.source} is incomplete: its config says modules_to_save="
                        f"{names!r}, but it has no tensor for {path}.{parameter}"
                    )

    def _saved_name(self, extra: Extra) -> str:
        """The name under which ``full_modules`` has to list the module of an extra.

        It is that of PEFT's ``modules_to_save`` where that is why the tensor is there.
        """
        names = (name for config in self.raw.all_configs for name in _saved(config))
        owner = extra.owner or ""
        return next((name for name in names if _is_below(owner, name)), owner)

    def _without_tensors(self, config: Mapping[str, Any], modules: list[str]) -> Iterator[str]:
        """The ``modules_to_save`` of a config of which the file has nothing.

        PEFT lists a few usual names of heads, of which a model has one.
        """
        saved = _saved(config)
        missing = [n for n in saved if not any(_is_below(module, n) for module in modules)]
        if len(missing) < len(saved):
            missing = [n for n in missing if any(_is_below(own, n) for own in self.layout.modules)]
        if missing:
            yield f"modules_to_save={missing!r}"


def room_needs(
    raw: RawAdapter,
    extras: Mapping[str, Tensor],
    layout: Layout,
    naming: Naming,
    found: Iterable[str],
    others: Collection[nn.Module],
) -> dict[str, Any]:
    """The options of `SlotManager` that make room for all these tensors.

    Args:
        raw: The file.
        extras: The tensors, by their names in the file.
        layout: All layers of the model that take adapters; they need not have slots.
        naming: Finds the modules of the file.
        found: All names of modules in the file that the model has.
        others: Modules that take low-rank updates of other files.
    """
    found = list(found)
    leftovers = Leftovers(raw, layout, naming, found, others)
    for key, tensor in extras.items():
        extra = read_extra(key, tensor, layout, naming)
        if not (is_replaced(key) or extra.is_idle or naming.other_component(extra.name, found)):
            leftovers.add(extra)
    return leftovers.needs()


def is_replaced(key: str) -> bool:
    """Whether a tensor is what PEFT's ``modules_to_save`` of the same file takes the place of."""
    return ".original_module." in key


def _saved(config: Mapping[str, Any]) -> list[str]:
    names = config.get("modules_to_save")
    return [str(name) for name in names] if isinstance(names, list | tuple | set) else []


def _is_below(module: str, name: str) -> bool:
    """Whether a module, or one that holds it, has a name that ends in ``name``."""
    return any(path.endswith(name) for path in _with_parents(module))


def _with_parents(module: str) -> Iterator[str]:
    """The name of a module, and those of the modules that hold it."""
    segments = module.split(".")
    return (".".join(segments[: end + 1]) for end in range(len(segments)))


def _kind(extra: Extra) -> str:
    if extra.diff:
        return extra.diff
    if "lora_" in extra.key:
        return "LoRA tensor of unknown meaning"
    if extra.key.endswith(".alpha"):
        return "alpha without LoRA tensors"
    if extra.live is not None and not isinstance(extra.live, nn.Parameter):
        return "buffer"
    if extra.parameter in _BIASES:
        return "bias"
    return "copy of a base weight" if ".base_layer." in extra.key else "full weight"


def _some(names: list[str]) -> str:
    """The first few names, and dots for the rest."""
    return ", ".join(names[:_SAMPLES] + ["..."] * (len(names) > _SAMPLES))
