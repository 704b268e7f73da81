"""What a user may mean by a model: one module, a pipeline's modules by name, or the pipeline."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import nn

from lora_slots.errors import ArgumentError


class Components(nn.Module):
    """Modules of one pipeline under a common root, whose paths begin with their component's name.

    It only holds them: nothing of them is changed, and nothing is ever run through it.

    Attributes:
        config: The config of the diffusers pipeline that they come from, if there is one.
    """

    def __init__(self, components: Mapping[str, nn.Module], config: Any = None) -> None:
        """Hold ``components``, by name."""
        super().__init__()
        self._modules.update(components)
        self.config = config


def components_of(model: object) -> dict[str, nn.Module]:
    """The modules that ``model`` stands for, as they are given; ``{"": model}`` for a single one.

    Args:
        model: An `nn.Module`, a mapping of names to modules, or a diffusers pipeline, of which
            those components are taken that diffusers loads LoRA into.

    Raises:
        ArgumentError: It is something else, or holds something else.
    """
    if isinstance(model, nn.Module):
        return {"": model}
    if _is_pipeline(model):
        return _of_pipeline(model)
    if not isinstance(model, Mapping):
        raise ArgumentError(
            "model must be an nn.Module, a mapping of names to modules or a diffusers pipeline, "
            f"got {type(model).__name__}"
        )
    if not model:
        raise ArgumentError("model must hold at least one component, got an empty mapping")
    for name, module in model.items():
        if not isinstance(name, str) or not name or "." in name:
            raise ArgumentError(
                f"a component's name must be a non-empty string without dots, got {name!r}"
            )
        if not isinstance(module, nn.Module):
            raise ArgumentError(
                f"component {name!r} must be an nn.Module, got {type(module).__name__}"
            )
    return dict(model)


def root_of(model: object) -> nn.Module:
    """One module that holds all that ``model`` stands for, without ``torch.compile``'s wrappers.

    Returns:
        The model itself if it is a single one, or its `Components`.

    Raises:
        ArgumentError: As for `components_of`.
    """
    components = {name: unwrap(module) for name, module in components_of(model).items()}
    if components.keys() == {""}:
        return components[""]
    return Components(components, getattr(model, "config", None))


def parts_of(root: nn.Module) -> dict[str, nn.Module]:
    """The components below a root, by name; ``{"": root}`` for a single model."""
    if isinstance(root, Components):
        return {name: part for name, part in root._modules.items() if part is not None}
    return {"": root}


def unwrap(module: nn.Module) -> nn.Module:
    """The module behind ``torch.compile``'s wrapper, or the module itself."""
    while is_wrapper(module):
        module = cast("nn.Module", module._orig_mod)
    return module


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` puts around one."""
    # Where Dynamo was never imported, which takes seconds, nothing can be.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def split_component(path: str, root: nn.Module) -> tuple[str, str]:
    """Split a module's path below ``root`` into its component and its path there."""
    if not isinstance(root, Components):
        return "", path
    component, _, inner = path.partition(".")
    return component, inner


def all_modules(components: Mapping[str, nn.Module]) -> Iterable[nn.Module]:
    """Every module of every component."""
    return (module for part in components.values() for module in part.modules())


def _is_pipeline(model: object) -> bool:
    # Where that module was never imported, nothing can be a pipeline.
    pipelines: Any = sys.modules.get("diffusers.pipelines.pipeline_utils")
    return pipelines is not None and isinstance(model, pipelines.DiffusionPipeline)


def _of_pipeline(pipeline: Any) -> dict[str, nn.Module]:
    names = getattr(pipeline, "_lora_loadable_modules", ())
    parts = {name: getattr(pipeline, name, None) for name in names}
    found = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    if not found:
        raise ArgumentError(
            f"{type(pipeline).__name__} has none of the components that diffusers loads LoRA into "
            f"({', '.join(names) or 'it names none'}); pass the components as a mapping, such as "
            "{'transformer': pipe.transformer}"
        )
    return found
