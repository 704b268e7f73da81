"""RawAdapter + Layout -> Adapter: the model's own module paths, and a scaling for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lora_slots.errors import AdapterFileError, TargetMismatchError, UnsupportedAdapterError
from lora_slots.layout import Layout, Target, spellings
from lora_slots.reading import RawAdapter
from lora_slots.resolve.extras import take_extras
from lora_slots.resolve.finding import Match
from lora_slots.resolve.fused import convert, convert_extras
from lora_slots.resolve.lycoris import expand, unflatten
from lora_slots.resolve.naming import Naming
from lora_slots.resolve.nesting import unnest
from lora_slots.resolve.pairing import Pair, pair_up, read_settings, settle_scaling
from lora_slots.resolve.renamed import with_fused_experts
from lora_slots.resolve.tokens import take_tokens

_SAMPLES = 3


@dataclass(frozen=True, eq=False)
class ModuleUpdate:
    """One module of an adapter, matched to a target module of the model.

    Attributes:
        target: The index of the target module in the layout.
        path: The target module's path.
        lora_A: ``[r, in]`` in the file's dtype, or ``[r, in, *kernel]``; None if there is no
            low-rank update.
        lora_B: ``[out, r]`` in the file's dtype, with any number of axes of size 1 after it.
        scaling: ``alpha / r`` or ``alpha / sqrt(r)``.
        magnitude: DoRA's magnitude, ``[out]``, if there is one.
        others: Rows for buffers other than ``lora_A`` and ``lora_B``, by the buffer's name.
        outer: The left factor of a Kronecker product as ``[out, r]`` and ``[r, in]``, whose right
            one is ``lora_B @ lora_A``, if the update is one that was not multiplied out.
    """

    target: int
    path: str
    lora_A: Tensor | None
    lora_B: Tensor | None
    scaling: float
    magnitude: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    outer: tuple[Tensor, Tensor] | None = None

    @property
    def rank(self) -> int:
        """The number of rows of ``lora_A``, multiplied out; 0 without one."""
        rank = 0 if self.lora_A is None else self.lora_A.shape[0]
        return rank if self.outer is None else rank * self.outer[1].shape[0]

    def with_others(self, others: Mapping[str, Tensor]) -> ModuleUpdate:
        """The same update with more such rows; those of one buffer add up."""
        sums = {n: self.others[n] + rows for n, rows in others.items() if n in self.others}
        return replace(self, others={**self.others, **others, **sums})

    def expanded(self) -> ModuleUpdate:
        """The same update, multiplied out."""
        if self.outer is None or self.lora_A is None or self.lora_B is None:
            return self
        A, B = expand(self.lora_A, self.lora_B, self.outer)
        return replace(self, lora_A=A, lora_B=B, outer=None)


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter under the model's own names.

    Attributes:
        source: Where it was read from.
        modules: One entry per target module, in the order of the model.
        skipped: Keys that are not applied, each with the reason.
        base_model: The base model that the adapter names, or empty.
        compressed: The relative error of each module, by its path, that was truncated to fit.
    """

    source: str
    modules: tuple[ModuleUpdate, ...]
    skipped: tuple[tuple[str, str], ...] = field(default=())
    base_model: str = ""
    compressed: Mapping[str, float] = field(default_factory=dict)


def resolve(raw: RawAdapter, layout: Layout, *, strict: bool = True) -> Adapter:
    """Match every tensor of ``raw`` to a target module and settle its scaling.

    Args:
        raw: What the file says.
        layout: What the model offers.
        strict: Raise for modules that are not found and for tensors that are not LoRA; otherwise
            skip and list them.

    Raises:
        AdapterFileError: The file contradicts itself: half a pair, two ranks, a bad alpha.
        UnsupportedAdapterError: A feature or a kind of layer that is not applied here.
        TargetMismatchError: Modules that this model does not have among its targets.
    """
    raw = with_fused_experts(raw, layout)
    settings = read_settings(raw)
    pairs, extras = pair_up(raw)
    naming = Naming([pair.module for pair in pairs], layout)
    extras = convert_extras(extras, layout, naming)
    pairs = unnest(pairs, layout, naming, raw)
    found: dict[int, tuple[Pair, float]] = {}
    matched: dict[str, str] = {}
    unmatched: list[str] = []
    # The model's own names of modules that the file calls otherwise.
    untargeted: list[str] = []
    for module, pair, match in find_targets(pairs, naming, layout, raw):
        if match is None or not layout.targets[match.target].low_rank:
            (unmatched if pair.module == module else untargeted).append(pair.module)
            continue
        matched[module] = pair.configured_as or match.name
        component = raw.component_of(module)
        scaling = settle_scaling(pair, matched[module], settings.get(component), raw)
        if match.target in found:
            _check_same(found[match.target], (pair, scaling), raw)
        else:
            found[match.target] = (pair, scaling)
    skipped = _take_other_components(unmatched, extras, naming, matched)
    unmatched += untargeted
    tokens, left_out = take_tokens(raw, extras, layout, strict=strict)
    known = [*matched, *(layout.targets[index].path for index in found)]
    whole, more_left_out = take_extras(raw, extras, layout, naming, known, strict=strict)
    skipped += left_out + more_left_out
    if not found and pairs:
        unmatched = [pair.module for pair in pairs]
    if unmatched and (strict or not found):
        raise _unmatched_error(raw, layout, naming, unmatched, len(pairs))
    skipped += [(module, _why_unmatched(module, layout, naming)) for module in unmatched]
    if not (found or tokens or whole):
        raise AdapterFileError(f"{raw.source} has no complete pair of lora_A and lora_B")
    for component, of_component in settings.items():
        names = [name for module, name in matched.items() if raw.component_of(module) == component]
        if names:
            of_component.warn_of_unused_patterns(names)
    updates = {
        index: update_of(index, layout.targets[index], pair, scaling)
        for index, (pair, scaling) in found.items()
    }
    for index, rows in [*tokens.items(), *whole.items()]:
        alone = ModuleUpdate(index, layout.targets[index].path, None, None, scaling=1.0)
        updates[index] = updates.get(index, alone).with_others(rows)
    modules = tuple(updates[index] for index in sorted(updates))
    named = (config.get("base_model_name_or_path") for config in raw.all_configs)
    base_model = str(next(filter(None, named), ""))
    return Adapter(raw.source, modules, tuple(skipped), base_model)


def find_targets(
    pairs: Iterable[Pair], naming: Naming, layout: Layout, raw: RawAdapter
) -> Iterator[tuple[str, Pair, Match | None]]:
    """Each module of the file with its pair, or the parts of it, and the target of each."""
    unknown = [
        pair
        for pair in pairs
        if naming.find(pair.module) is None and naming.module(pair.module) is None
    ]
    foreign = convert(unknown, layout, raw)
    for pair in pairs:
        if pair.module not in foreign:
            yield pair.module, pair, naming.find(pair.module)
        for part in foreign.get(pair.module, ()):
            found = layout.find(part.module)
            # The patterns of a config speak of the file's own names.
            match = None if found is None else Match(found[0], spellings(pair.module)[-1])
            yield pair.module, part, match


def update_of(index: int, target: Target, pair: Pair, scaling: float) -> ModuleUpdate:
    """A pair as what its target module, whose index this is, makes of it."""
    others = {}
    if pair.lora_bias is not None:
        # In float64, so that the buffer's float32 is the only rounding.
        others["lora_bias"] = scaling * pair.lora_bias.detach().double().flatten()[None]
    if vars(target.module).get("groups", 1) > 1:
        pair = pair.expanded()
    A, B = unflatten(pair.lora_A, pair.outer, target.in_shape), pair.lora_B
    if pair.outer is None:
        A, B = target.kind.whole(target.module, A, B)
    return ModuleUpdate(
        target=index,
        path=target.path,
        lora_A=A,
        lora_B=B,
        scaling=scaling,
        magnitude=pair.magnitude,
        others=others,
        outer=pair.outer,
    )


def _take_other_components(
    unmatched: list[str], extras: dict[str, Tensor], naming: Naming, matched: Iterable[str]
) -> list[tuple[str, str]]:
    """Take what is for components that are not this model's out of ``unmatched`` and ``extras``."""
    skipped = []
    for name in [*unmatched, *extras]:
        component = naming.other_component(name, matched)
        if component:
            skipped.append((name, f"other_component: {component}"))
            extras.pop(name, None)
    unmatched[:] = [name for name in unmatched if not naming.other_component(name, matched)]
    return skipped


def _check_same(one: tuple[Pair, float], other: tuple[Pair, float], raw: RawAdapter) -> None:
    (first, scaling), (second, other_scaling) = one, other
    ours, theirs = ((p.lora_A, p.lora_B, *(p.outer or ())) for p in (first, second))
    same = len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    if scaling != other_scaling or not same:
        raise TargetMismatchError(
            f"{first.module} and {second.module} are one shared module in this model, but "
            f"{raw.source} has different tensors or scalings for them"
        )


def _class_name(module: str, layout: Layout, naming: Naming) -> str | None:
    return next((layout.others[n] for n in naming.paths(module) if n in layout.others), None)


def _why_unmatched(module: str, layout: Layout, naming: Naming) -> str:
    kind = _class_name(module, layout, naming)
    if layout.tensor(module) is not None:
        return "is a parameter that is not among the target modules"
    return f"is {kind}, not one of the target modules" if kind else "no such module in the model"


def _unmatched_error(
    raw: RawAdapter, layout: Layout, naming: Naming, unmatched: list[str], total: int
) -> TargetMismatchError | UnsupportedAdapterError:
    from lora_slots.layers import KINDS

    slotted = {kind.name for kind in KINDS}
    listed = _some([f"{name}: {_why_unmatched(name, layout, naming)}" for name in unmatched], "; ")
    ours = _some([target.path for target in layout if target.low_rank])
    message = (
        f"{len(unmatched)} of the {total} modules of {raw.source} match no target module of this "
        f"model ({listed}); the model's target modules are {ours}"
    )
    for module in unmatched:
        kind = _class_name(module, layout, naming)
        if kind is not None and not any(name in kind for name in slotted):
            return UnsupportedAdapterError(
                f"{message}; {kind} layers such as {module} have no slots yet"
            )
    return TargetMismatchError(
        f"{message}; build the SlotManager with target_modules that include them, or pass "
        "strict=False to skip them"
    )


def _some(names: list[str], separator: str = ", ") -> str:
    """The first few names, and dots for the rest."""
    return separator.join(names[:_SAMPLES] + ["..."] * (len(names) > _SAMPLES))
