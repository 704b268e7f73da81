"""Pairs for parameters that a module reads by itself, which files name by the module alone.

PEFT wraps a module once for each of its parameters, the first one innermost, so that
``experts.base_layer.lora_A`` is for another parameter than ``experts.lora_A``. Of
`nn.MultiheadAttention` it wraps the output projection along with the rest. The experts of a mixture
lie side by side in one tensor.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from lora_slots.attach.parameters import IN_PROJ, attention_of, matrices
from lora_slots.errors import AdapterFileError, TargetMismatchError, UnsupportedAdapterError
from lora_slots.layers import kind_of
from lora_slots.layers.low_rank import expert_sizes
from lora_slots.layout import Layout
from lora_slots.reading import RawAdapter
from lora_slots.resolve.naming import Naming, below
from lora_slots.resolve.pairing import Pair

_LEVEL = ".base_layer"


def unnest(pairs: Iterable[Pair], layout: Layout, naming: Naming, raw: RawAdapter) -> list[Pair]:
    """Bring the pairs for parameters under the parameters' names; keep the others.

    Args:
        pairs: All pairs of the file.
        layout: The model.
        naming: Finds the modules of the file.
        raw: The file that they come from.

    Returns:
        The pairs in their order. Those for experts have one row for each rank:
        ``lora_A [r, experts * in]`` and ``lora_B [experts * out, r]``.

    Raises:
        AdapterFileError: The tensors are for more or fewer parameters than the config names.
        UnsupportedAdapterError: Which parameter a tensor is for is not to be known, or it has
            something beside a low-rank update.
        TargetMismatchError: The tensors do not fit the parameter.
    """
    pairs = list(pairs)
    renamed: dict[str, Pair] = {}
    nests: dict[tuple[str, str, nn.Module], list[Pair]] = defaultdict(list)
    for pair in pairs:
        plain = pair.module.replace(_LEVEL, "")
        found = None if naming.find(pair.module) else naming.module(plain)
        if found is None:
            continue
        path, module = found
        attention = attention_of(path, layout.modules)
        if attention is not None:
            renamed[pair.module] = _in_attention(pair, plain, path, module, attention, raw)
        elif kind_of(module) is None:
            nests[plain, path, module].append(pair)
    for (plain, path, module), nest in nests.items():
        renamed |= _unnested(plain, nest, path, module, raw)
    return [renamed.get(pair.module, pair) for pair in pairs]


def _in_attention(
    pair: Pair, plain: str, path: str, module: nn.Module, attention: str, raw: RawAdapter
) -> Pair:
    """A pair for one of the projections of an `nn.MultiheadAttention`."""
    if path == attention and IN_PROJ not in matrices(module):
        return pair
    parameter = IN_PROJ if path == attention else "weight"
    if path != attention and _LEVEL in pair.module:
        # What PEFT wraps along with the attention is configured with it, and PEFT adds it twice,
        # in training too: `MultiheadAttention.merge` does, then has the projection merge itself.
        pair = replace(pair, lora_B=2 * pair.lora_B, configured_as=attention)
    elif path == attention:
        pair = replace(pair, configured_as=attention)
    return _split(pair, plain, module, parameter, raw)


def _unnested(
    plain: str, nest: Sequence[Pair], path: str, module: nn.Module, raw: RawAdapter
) -> dict[str, Pair]:
    """The pairs of one module that is wrapped once for each, by their names in the file."""
    inner_first = sorted(nest, key=lambda pair: pair.module.count(_LEVEL), reverse=True)
    levels = [pair.module.count(_LEVEL) for pair in reversed(inner_first)]
    if levels != list(range(len(nest))):
        raise AdapterFileError(
            f"{raw.source} wraps {plain} {max(levels) + 1} times, but has the tensors of "
            f"{len(nest)} of these only"
        )
    names = _configured(path, module, raw.config_of(nest[0].module) or {})
    if names is None:
        names = _by_shape(plain, module, inner_first, raw)
        if not names:
            return {}
    if len(names) != len(nest):
        raise AdapterFileError(
            f"the target_parameters of {raw.source} name {len(names)} parameters of {plain} "
            f"({', '.join(names)}), but there are tensors for {len(nest)}"
        )
    return {
        pair.module: _split(pair, plain, module, name, raw)
        for pair, name in zip(inner_first, names, strict=True)
    }


def _configured(path: str, module: nn.Module, config: Mapping[str, Any]) -> list[str] | None:
    """Those parameters of a module that the config of an adapter names, in the module's order.

    Source: PEFT, ``BaseTuner._inject_parameters``.
    """
    wanted = config.get("target_parameters")
    if not isinstance(wanted, list | tuple | set) or not wanted:
        return None
    return [
        name
        for name in module._parameters
        if any(f".{path}.{name}".endswith(f".{ending}") for ending in wanted)
    ]


def _by_shape(
    plain: str, module: nn.Module, inner_first: Sequence[Pair], raw: RawAdapter
) -> list[str]:
    """The only parameters, in the module's order, that the tensors fit; none if it has none."""
    names = list(matrices(module))
    choices = [
        choice
        for choice in itertools.combinations(names, len(inner_first))
        if all(_fits(p, module, n) for p, n in zip(inner_first, choice, strict=True))
    ]
    if len(choices) > 1:
        raise UnsupportedAdapterError(
            f"the tensors of {raw.source} for {plain} may be for its parameters "
            f"{' or '.join(', '.join(choice) for choice in choices)}; only a config with "
            "target_parameters tells: pass read_adapter one"
        )
    if names and not choices:
        _split(inner_first[0], plain, module, names[0], raw)
        raise TargetMismatchError(
            f"the tensors of {raw.source} for {plain} fit none of its parameters "
            f"({', '.join(names)}): it was made for another model"
        )
    return list(choices[0]) if choices else []


def _fits(pair: Pair, module: nn.Module, parameter: str) -> bool:
    experts, in_features, out_features = expert_sizes(module, parameter)
    rows, width = pair.lora_A.shape[0], pair.lora_A[0].numel()
    return (width, len(pair.lora_B)) == (in_features, out_features) and rows % experts == 0


def _split(pair: Pair, plain: str, module: nn.Module, parameter: str, raw: RawAdapter) -> Pair:
    """A pair under the name of its parameter, with the ranks of all experts in the same rows.

    Source: PEFT, ``ParamWrapper.get_delta_weight``.
    """
    name = below(plain, parameter)
    experts, in_features, out_features = expert_sizes(module, parameter)
    if pair.magnitude is not None or pair.lora_bias is not None:
        what = "lora_bias" if pair.magnitude is None else "DoRA"
        raise UnsupportedAdapterError(
            f"{raw.source} uses {what} on {name}, a parameter, which is not applied here"
        )
    if experts == 1:
        return replace(pair, module=name)
    if pair.outer is not None:
        raise UnsupportedAdapterError(
            f"{raw.source} has a Kronecker product for {name}, whose experts take LoRA only"
        )
    if not _fits(pair, module, parameter):
        raise TargetMismatchError(
            f"{name} has {experts} experts with in_features={in_features} and "
            f"out_features={out_features}, so lora_A must be ({experts} * rank, {in_features}) and "
            f"lora_B ({out_features}, {experts} * rank); {raw.source} has "
            f"{tuple(pair.lora_A.shape)} and {tuple(pair.lora_B.shape)}: it was made for another "
            "model"
        )
    rank = pair.lora_A.shape[0] // experts
    A = pair.lora_A.reshape(experts, rank, in_features).transpose(0, 1)
    B = pair.lora_B.reshape(out_features, rank, experts).permute(2, 0, 1)
    return replace(pair, module=name, lora_A=A.flatten(1), lora_B=B.reshape(-1, rank), dim=rank)
