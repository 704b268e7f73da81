"""Which parameters of a model take adapters by themselves, where its layers do not.

That is so for whole modules that are replaced, and for parameters that a module reads on its own:
the projections of `nn.MultiheadAttention`, and the experts of a mixture.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import nn

from lora_slots.attach.components import split_component
from lora_slots.errors import ArgumentError, TargetMismatchError
from lora_slots.layers.low_rank import low_rank_kind, takes_low_rank
from lora_slots.layers.parameter import full_kind, has_parameter
from lora_slots.layout import Target, without_wrappers

IN_PROJ = "in_proj_weight"
# The bias that is added where a parameter is multiplied with.
_BIAS = {IN_PROJ: "in_proj_bias", "weight": "bias"}

Names = Mapping[nn.Module, Sequence[str]]


def low_rank_target(
    model: nn.Module, module: nn.Module, aliases: Sequence[str], parameter: str
) -> Target:
    """A parameter that takes low-rank updates.

    Raises:
        TargetMismatchError: It has not two or three dimensions, or is quantised.
    """
    if not takes_low_rank(module, parameter):
        separate = parameter == IN_PROJ and isinstance(module, nn.MultiheadAttention)
        reason = (
            "has separate projections, since its kdim or vdim is another than its embed_dim"
            if separate
            else "is not a floating-point matrix, or one for each of several experts"
        )
        path = without_wrappers(aliases[0])
        raise TargetMismatchError(
            f"target module {path if separate else f'{path}.{parameter}'} {reason}, which takes no "
            "adapters; leave it out of target_modules"
        )
    kind = low_rank_kind(parameter)
    names = tuple(f"{alias}.{parameter}" for alias in aliases)
    return Target(
        without_wrappers(names[0]), names, kind, module, *kind.shape(module),
        parameter=parameter, component=split_component(names[0], model)[0],
    )  # fmt: skip


def full_target(
    model: nn.Module, module: nn.Module, aliases: Sequence[str], parameter: str
) -> Target:
    """A parameter that other tensors can take the place of.

    Raises:
        TargetMismatchError: It is quantised, or its module never reads it by its name.
    """
    names = tuple(f"{alias}.{parameter}" for alias in aliases)
    path = without_wrappers(names[0])
    if not has_parameter(module, parameter):
        raise TargetMismatchError(
            f"{path}, which full_modules asks for, is stored as "
            f"{getattr(module, parameter).dtype}, and only floating-point parameters can be "
            "replaced; leave it out of full_modules"
        )
    if isinstance(module, nn.RNNBase):
        raise TargetMismatchError(
            f"{path}, which full_modules asks for, is kept by {type(module).__name__} in a list "
            "of its own, so that an adapter would be ignored; leave it out of full_modules"
        )
    kind = full_kind(parameter)
    return Target(
        path, names, kind, module, *kind.shape(module),
        parameter=parameter, component=split_component(names[0], model)[0], low_rank=False,
    )  # fmt: skip


def bias_target(model: nn.Module, target: Target) -> Target | None:
    """The bias beside a parameter that takes low-rank updates, if there is one."""
    bias = _BIAS.get(target.parameter, "")
    if not has_parameter(target.module, bias):
        return None
    aliases = [name.removesuffix(f".{target.parameter}") for name in target.aliases]
    return full_target(model, target.module, aliases, bias)


def full_targets(
    model: nn.Module, names: Names, full_modules: Collection[str]
) -> dict[nn.Module, list[Target]]:
    """All parameters of the modules that ``full_modules`` names, by the module that owns each.

    Raises:
        ArgumentError: ``full_modules`` is no collection of names.
        TargetMismatchError: A name matches no module, or what cannot be replaced.
    """
    if isinstance(full_modules, str) or not all(
        isinstance(name, str) and name for name in full_modules
    ):
        raise ArgumentError(f"full_modules must be a collection of names, got {full_modules!r}")
    wanted: dict[nn.Module, None] = {}
    for ending in full_modules:
        roots = [
            module
            for module, aliases in names.items()
            if any(without_wrappers(alias).endswith(ending) for alias in aliases)
        ]
        if not any(True for root in roots for _ in root.parameters()):
            raise TargetMismatchError(
                f"full_modules has {ending!r}, which ends the name of no module with parameters "
                f"in this {type(model).__name__}"
            )
        wanted |= {module: None for root in roots for module in root.modules()}
    found: dict[nn.Module, list[Target]] = defaultdict(list)
    for module in wanted:
        for parameter, value in module._parameters.items():
            if value is not None:
                found[module].append(full_target(model, module, names[module], parameter))
    return found


def attention_outputs(model: nn.Module) -> dict[nn.Module, nn.MultiheadAttention]:
    """The output projections that an `nn.MultiheadAttention` reads and never calls."""
    return {
        module.out_proj: module
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
    }


def attention_of(path: str, modules: Mapping[str, nn.Module]) -> str | None:
    """The path of the `nn.MultiheadAttention` that a module is, or whose ``out_proj`` it is."""
    if isinstance(modules[path], nn.MultiheadAttention):
        return path
    parent, _, own = path.rpartition(".")
    is_output = own == "out_proj" and isinstance(modules.get(parent), nn.MultiheadAttention)
    return parent if is_output else None


def matrices(module: nn.Module) -> Iterator[str]:
    """The names of a module's own parameters that take low-rank updates, in its order."""
    if isinstance(module, nn.MultiheadAttention):
        return (name for name in (IN_PROJ,) if takes_low_rank(module, name))
    return (name for name in module._parameters if takes_low_rank(module, name))
