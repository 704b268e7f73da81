"""Which base layers of a model take adapters: the choice, and the Layout of what was chosen."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from lora_slots.attach.choices import Search, TargetModules, choices_of
from lora_slots.attach.components import parts_of, split_component
from lora_slots.attach.parameters import (
    attention_outputs,
    bias_target,
    full_targets,
    low_rank_target,
    matrices,
)
from lora_slots.errors import TargetMismatchError
from lora_slots.layers import KINDS, kind_of
from lora_slots.layout import Layout, Target, named_modules, without_wrappers
from lora_slots.resolve.tokens import token_layers

_NAMES = [kind.name for kind in KINDS]
_LISTED = f"{', '.join(_NAMES[:-1])} and {_NAMES[-1]}"


def survey(
    model: nn.Module,
    target_modules: TargetModules | None = None,
    *,
    token_rows: int = 0,
    full_modules: Collection[str] = (),
    bias: bool = False,
) -> Layout:
    """The layout of the layers that ``target_modules`` names; None: of all that take adapters.

    Changes nothing.

    Args:
        model: A single model or the `Components` of a pipeline.
        target_modules: As for `SlotManager`.
        token_rows: How many trained rows the slots of embeddings shall hold.
        full_modules: As for `SlotManager`.
        bias: Whether the biases beside parameters that take low-rank updates can be replaced.

    Raises:
        TargetMismatchError: Nothing matches, or a match cannot take adapters.
    """
    names: dict[nn.Module, list[str]] = {}
    for path, module in named_modules(model):
        names.setdefault(module, []).append(path)
    choices = choices_of(model, target_modules)
    search = Search(model, names, choices, attention_outputs(model))
    matched: set[str] = set()
    targets: list[Target] = []
    in_encoder_layers = _in_encoder_layers(model)
    with_tokens = token_layers(model) if token_rows else {}
    full = full_targets(model, names, full_modules)
    for module, aliases in names.items():
        kind = kind_of(module)
        choice, parameters = search.layer(module), search.parameters(module)
        path = without_wrappers(aliases[0])
        if module in full:
            wanted = [*([choice] if choice else []), *parameters.values()]
            # What is tied to an embedding would miss the rows that this gets.
            tied = with_tokens.get(module) is not None
            if tied or any(each.kinds is None for each in wanted):
                raise TargetMismatchError(
                    f"{path} is in full_modules, so that it takes whole tensors and nothing else; "
                    "leave it out of full_modules, or out of target_modules and token_rows"
                )
            targets += full[module]
            continue
        for parameter, by in parameters.items():
            matched.add(by.component)
            target = low_rank_target(model, module, aliases, parameter)
            beside = bias_target(model, target) if bias else None
            targets += [target, *([beside] if beside else [])]
        if choice is None and module not in with_tokens:
            continue
        if kind is None:
            listed = ", ".join(f"{path}.{name}" for name in matrices(module))
            raise TargetMismatchError(
                f"target module {path} is {type(module).__name__}; only {_LISTED} layers take "
                "adapters, and subclasses that run as they do"
                f"{f'; its parameters do if they are named: {listed}' if listed else ''}"
            )
        if choice is not None:
            matched.add(choice.component)
        targets.append(
            Target(
                path, tuple(aliases), kind, module, *kind.shape(module),
                component=split_component(path, model)[0],
                in_encoder_layer=module in in_encoder_layers,
                low_rank=choice is not None,
                token_rows=token_rows if module in with_tokens else 0,
                tied_to=with_tokens.get(module),
            )
        )  # fmt: skip
    silent = [name for name in choices if name not in matched]
    if (not matched and not full) or (silent and isinstance(target_modules, Mapping)):
        raise _no_match(model, target_modules, silent)
    if token_rows and not any(target.token_rows for target in targets):
        raise TargetMismatchError(
            f"token_rows={token_rows} gives room to embeddings, but this {type(model).__name__} "
            "has none that take it"
        )
    return Layout.of(model, tuple(targets))


def _no_match(
    model: nn.Module, target_modules: TargetModules | None, silent: list[str]
) -> TargetMismatchError:
    parts = parts_of(model)
    own = [
        path
        for path, module in named_modules(model)
        if kind_of(module) and split_component(path, model)[0] in silent
    ]
    where = " and of ".join(
        f"{f'{name}, ' if name else ''}this {type(parts[name]).__name__}" for name in silent
    )
    return TargetMismatchError(
        f"target_modules={target_modules!r} matches no module of {where}; "
        f"its layers that take adapters are {', '.join(own[:3]) or 'none'}"
    )


def _in_encoder_layers(model: nn.Module) -> set[nn.Module]:
    return {
        inner
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoderLayer)
        for inner in module.modules()
    }
