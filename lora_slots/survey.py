"""Which base layers of a model take adapters: the choice, and the Layout of what was chosen."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from lora_slots.errors import ArgumentError, TargetMismatchError
from lora_slots.layers import KINDS, kind_of
from lora_slots.layout import Layout, Target, named_modules, spellings, without_wrappers

TargetModules = str | Collection[str]
ALL_LINEAR = "all-linear"


def survey(model: nn.Module, target_modules: TargetModules | None = None) -> Layout:
    """The layout of the layers that ``target_modules`` names; None: of all that take adapters.

    Changes nothing.

    Raises:
        TargetMismatchError: Nothing matches, or a match cannot take adapters.
    """
    names: dict[nn.Module, list[str]] = {}
    for path, module in named_modules(model):
        names.setdefault(module, []).append(path)
    bypassed = _bypassed(model)
    wanted = _selector(model, target_modules)
    keyword = _is_keyword(target_modules)
    targets: list[Target] = []
    in_encoder_layers = _in_encoder_layers(model)
    for module, aliases in names.items():
        kind = kind_of(module)
        if not any(wanted(name) for alias in aliases for name in spellings(alias)):
            continue
        skip = bypassed.get(aliases[0])
        if keyword and (kind is None or skip is not None):
            continue
        path = without_wrappers(aliases[0])
        if skip is not None:
            raise TargetMismatchError(
                f"target module {path} {skip}; leave it out of target_modules"
            )
        if kind is None:
            raise TargetMismatchError(
                f"target module {path} is {type(module).__name__}; only "
                f"{' and '.join(kind.name for kind in KINDS)} layers take adapters"
            )
        targets.append(
            Target(
                path, tuple(aliases), kind, module, *kind.shape(module),
                in_encoder_layer=module in in_encoder_layers,
            )
        )  # fmt: skip
    if not targets:
        samples = [path for path, module in named_modules(model) if kind_of(module)][:3]
        raise TargetMismatchError(
            f"target_modules={target_modules!r} matches no module of this {type(model).__name__}; "
            f"its layers that take adapters are {', '.join(samples) or 'none'}"
        )
    return Layout.of(model, tuple(targets), bypassed)


def _is_keyword(target_modules: TargetModules | None) -> bool:
    return target_modules is None or (
        isinstance(target_modules, str) and target_modules.lower() == ALL_LINEAR
    )


def _selector(model: nn.Module, target_modules: TargetModules | None) -> Callable[[str], bool]:
    """Whether a module name is wanted, by PEFT's own rule."""
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
        target_modules = list(target_modules)
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


def _bypassed(model: nn.Module) -> dict[str, str]:
    """Layers that are never called, whatever the settings, by every name."""
    reason = (
        "is read by nn.MultiheadAttention and never called, so that an adapter would be ignored"
    )
    return {
        f"{path}.out_proj": reason
        for path, module in named_modules(model)
        if isinstance(module, nn.MultiheadAttention)
    } | ({"out_proj": reason} if isinstance(model, nn.MultiheadAttention) else {})


def _in_encoder_layers(model: nn.Module) -> set[nn.Module]:
    return {
        inner
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoderLayer)
        for inner in module.modules()
    }
