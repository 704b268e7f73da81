"""What ``target_modules`` wants of a model: layers, and parameters by themselves."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lora_slots.attach.components import parts_of, split_component
from lora_slots.attach.parameters import IN_PROJ, Names, matrices
from lora_slots.errors import ArgumentError
from lora_slots.layers import KINDS, LayerKind, kind_of
from lora_slots.layout import named_modules, spellings

# For all components, or by component.
TargetModules = str | Collection[str] | Mapping[str, str | Collection[str]]
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Choice:
    """What is wanted of one component.

    Attributes:
        component: Its name.
        names: Whether a module of this name within the component is wanted.
        kinds: The kinds of layer that are meant, all others being passed over; None where every
            module was named, so that one of no kind is an error.
        parameters: Whether names of parameters are meant, too.
    """

    component: str
    names: Callable[[str], bool]
    kinds: tuple[LayerKind, ...] | None
    parameters: bool


@dataclass(frozen=True)
class Search:
    """Who wants a module, or a parameter of it.

    Attributes:
        model: As for `survey`.
        names: All modules, each with its names.
        choices: What is wanted of each component.
        outputs: The layers that an `nn.MultiheadAttention` reads and never calls.
    """

    model: nn.Module
    names: Names
    choices: Mapping[str, Choice]
    outputs: Mapping[nn.Module, nn.MultiheadAttention]

    def layer(self, module: nn.Module) -> Choice | None:
        """The choice that wants a module as a layer, if one does."""
        if isinstance(module, nn.MultiheadAttention) or module in self.outputs:
            return None
        choice, kind = self._first(self.names[module]), kind_of(module)
        if choice is None and kind is not None:
            # What a layer's slots adapt is its weight.
            return self._parameter(module, "weight")
        passed_over = choice is not None and choice.kinds is not None and kind not in choice.kinds
        return None if passed_over else choice

    def parameters(self, module: nn.Module) -> dict[str, Choice]:
        """The parameters of a module that are wanted by themselves, each with the choice of it."""
        attention = self.outputs.get(module)
        by_name = self._first(self.names[module])
        found: dict[str, Choice] = {}
        if isinstance(module, nn.MultiheadAttention) and by_name is not None and by_name.parameters:
            if by_name.kinds is None or module.in_proj_weight is not None:
                found[IN_PROJ] = by_name
        elif attention is not None:
            by_attention = self._first(self.names.get(attention, ()))
            if by_name is not None:
                found["weight"] = by_name
            elif by_attention is not None and by_attention.kinds is None:
                found["weight"] = by_attention
        if kind_of(module) is None or attention is not None:
            for name in matrices(module):
                choice = self._parameter(module, name)
                if choice is not None:
                    found.setdefault(name, choice)
        return found

    def _parameter(self, module: nn.Module, name: str) -> Choice | None:
        choice = self._first(f"{alias}.{name}" for alias in self.names[module])
        return choice if choice is not None and choice.parameters else None

    def _first(self, aliases: Iterable[str]) -> Choice | None:
        found = (_chosen(alias, self.model, self.choices) for alias in aliases)
        return next(filter(None, found), None)


def _chosen(alias: str, model: nn.Module, choices: Mapping[str, Choice]) -> Choice | None:
    """The choice that wants the module of this name, if one does."""
    component, path = split_component(alias, model)
    choice = choices.get(component)
    wanted = choice is not None and path and any(map(choice.names, spellings(path)))
    return choice if wanted else None


def choices_of(model: nn.Module, target_modules: TargetModules | None) -> dict[str, Choice]:
    """What is wanted of each component.

    Raises:
        ArgumentError: ``target_modules`` is neither a string nor a collection of strings, nor such
            by component.
    """
    parts = parts_of(model)
    if not isinstance(target_modules, Mapping):
        return {name: _choice(name, part, target_modules) for name, part in parts.items()}
    unknown = [name for name in target_modules if name not in parts]
    if unknown or not target_modules or None in target_modules.values():
        raise ArgumentError(
            "target_modules by component must give a string or a collection of strings to some of "
            f"{', '.join(map(repr, parts))}, got {target_modules!r}"
        )
    return {
        name: _choice(name, part, target_modules[name])
        for name, part in parts.items()
        if name in target_modules
    }


def _choice(component: str, part: nn.Module, wanted: str | Collection[str] | None) -> Choice:
    kinds = tuple(kind for kind in KINDS if kind.is_linear) if wanted is not None else KINDS
    names = _selector(component, part, wanted)
    keyword = _is_keyword(wanted)
    return Choice(component, names, kinds if keyword else None, wanted is None or not keyword)


def _is_keyword(target_modules: str | Collection[str] | None) -> bool:
    return target_modules is None or (
        isinstance(target_modules, str) and target_modules.lower() == ALL_LINEAR
    )


def _selector(
    component: str, model: nn.Module, target_modules: str | Collection[str] | None
) -> Callable[[str], bool]:
    """Whether a module name is wanted, by PEFT's own rule for a model of its own."""
    if target_modules is None:
        return lambda name: True
    if _is_keyword(target_modules):
        output = _output_embeddings(model)
        heads = {
            name
            for path, module in named_modules(model)
            if module is output
            for name in spellings(path)
        }
        return lambda name: name not in heads
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    if not isinstance(target_modules, str):
        if not isinstance(target_modules, Collection) or not all(
            isinstance(name, str) for name in target_modules
        ):
            raise ArgumentError(
                "target_modules must be a string or a collection of strings, got "
                f"{target_modules!r}"
            )
        # The names that `Target.path` gives begin with the component's.
        prefix = f"{component}." if component else ""
        target_modules = [name.removeprefix(prefix) for name in target_modules]
    else:
        try:
            re.compile(target_modules)
        except re.error as error:
            raise ArgumentError(
                f"target_modules={target_modules!r} is no valid regular expression: {error}"
            ) from error
    config = LoraConfig(target_modules=target_modules)
    return lambda name: bool(check_target_module_exists(config, name))


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    """The language-model head, which PEFT's "all-linear" leaves out."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    head: nn.Module | None = model.get_output_embeddings()
    return head
