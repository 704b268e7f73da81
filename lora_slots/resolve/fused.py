"""Pairs under another architecture's names -> pairs for the model's own modules.

One module of the file may be several of the model, such as a fused qkv projection: each takes all
of ``lora_A`` and its own rows of ``lora_B``, and is scaled as the whole was.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from lora_slots.layout import Layout
from lora_slots.reading import RawAdapter
from lora_slots.reading.keys import split_key
from lora_slots.resolve.converting import Place, places_of
from lora_slots.resolve.naming import Naming
from lora_slots.resolve.pairing import Pair

# Parts that are added to a weight or bias, and have a row for each output.
_ADDED = frozenset({"diff", "diff_b", "w_norm", "b_norm"})


def convert(pairs: Iterable[Pair], layout: Layout, raw: RawAdapter) -> dict[str, tuple[Pair, ...]]:
    """Bring those of ``pairs`` under the model's own names whose modules diffusers knows.

    The tensors of the result are those of the file or parts of them, and what alpha is divided by
    stays the number of rows that the file has.

    Args:
        pairs: Pairs whose modules the model does not have.
        layout: The model.
        raw: The file that they come from.

    Returns:
        For each module of the file that was known, what becomes of its pair: together they take
        each of its outputs once.

    Raises:
        UnsupportedAdapterError: diffusers is needed for that, and is not installed.
    """
    given = {pair.module: pair for pair in pairs}
    sizes = {module: (pair.rank, pair.outputs) for module, pair in given.items()}
    places = places_of(sizes, layout)
    if any(len(targets) > 1 for targets in places.values()):
        _warn_if_trained_apart(raw)
    return {
        module: tuple(_part(given[module], place) for place in targets)
        for module, targets in places.items()
    }


def convert_extras(
    extras: Mapping[str, Tensor], layout: Layout, naming: Naming
) -> dict[str, Tensor]:
    """Bring what is added to whole parameters under the model's own names, too; keep the rest.

    Args:
        extras: Tensors of a file that are no low-rank updates, by their names there.
        layout: The model.
        naming: Finds the modules of the file.

    Raises:
        UnsupportedAdapterError: diffusers is needed for that, and is not installed.
    """
    splits = {key: split for key in extras if (split := split_key(key)) is not None}
    sizes = {
        module: (1, len(extras[key]))
        for key, (module, part) in splits.items()
        if part in _ADDED and extras[key].ndim and naming.module(module) is None
    }
    places = places_of(sizes, layout)
    converted: dict[str, Tensor] = {}
    for key, tensor in extras.items():
        module, part = splits.get(key, ("", ""))
        for place in places.get(module, ()):
            # An alpha beside them is one number for all outputs.
            converted[f"{place.path}.{part}"] = place.of(tensor) if tensor.ndim else tensor
        if module not in places:
            converted[key] = tensor
    return converted


def _part(pair: Pair, place: Place) -> Pair:
    if place.rows is None:
        return replace(pair, module=place.path)
    whole = pair.expanded()
    part = replace(
        whole,
        module=place.path,
        lora_B=place.of(whole.lora_B),
        lora_bias=_rows(pair.lora_bias, place),
        magnitude=_rows(pair.magnitude, place),
    )
    return _compact(part) if isinstance(place.rows, slice) else part


def _rows(tensor: Tensor | None, place: Place) -> Tensor | None:
    return None if tensor is None else place.of(tensor.flatten())


def _compact(pair: Pair) -> Pair:
    """Leave out what is multiplied by zero: a block-diagonal ``lora_B`` has one block a module.

    Exact, since ``dim`` stays. On ``meta`` nothing is known to be zero.
    """
    if pair.lora_B.is_meta:
        return pair
    used = pair.lora_B.flatten(1).ne(0).any(0)
    if not used.any():
        # A pair has at least one row.
        used[0] = True
    if used.all():
        return pair
    rows = used.nonzero().flatten()
    return replace(pair, lora_A=pair.lora_A[rows], lora_B=pair.lora_B[:, rows])


def _warn_if_trained_apart(raw: RawAdapter) -> None:
    """Say that sd-scripts trained the parts of fused modules apart, and how they are scaled then.

    It stores them in one module that has the rows of all and the alpha of one. Its own loader, like
    all others, divides that alpha by all the rows.
    """
    try:
        arguments = json.loads(raw.metadata.get("ss_network_args", "{}"))
    except (ValueError, RecursionError):
        return
    if isinstance(arguments, dict) and str(arguments.get("split_qkv")).lower() == "true":
        warnings.warn(
            f"{raw.source} was trained with split_qkv=True and ss_network_dim="
            f"{raw.metadata.get('ss_network_dim')}; its fused modules are scaled by alpha / rows, "
            "as sd-scripts scales them on loading, which is weaker than in training by the number "
            "of projections in each",
            stacklevel=2,
        )
