"""A file's names for modules -> the target modules of the model. Knows no tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from lora_slots.errors import TargetMismatchError
from lora_slots.layout import PEFT_PREFIX, WRAPPER_SEGMENTS, Layout, without_wrappers
from lora_slots.resolve.finding import Finder, Match, Name, plain

# How files begin the names of a component's modules: kohya's trainers and those that write like
# them, with the dots of a path as underscores; and with dots.
_FLAT = re.compile(r"(?:lora_(?:prior_)?(?P<label>unet|transformer|te\d?)|lycoris)_(?P<path>[^.]+)")
_DOTTED = re.compile(
    r"(?:module\.)?(?:lora_|model\.(?=diffusion_model\.))?"
    r"(?P<label>unet|transformer|diffusion_model|prior|text_encoder(?:_\d)?|te\d?)\.(?P<path>.+)"
)
_TEXT_ENCODERS = {"te": "text_encoder", "te1": "text_encoder"} | {
    f"te{number}": f"text_encoder_{number}" for number in range(2, 10)
}
# A pipeline has one of these, and files do not agree on what to call it.
_DENOISERS = ("unet", "transformer", "prior")
_ANY_DENOISER = "diffusion_model"
# kohya's trainer of Flux counts past the second of SD3, which Flux does not have.
_INSTEAD = {"text_encoder_3": ("text_encoder_3", "text_encoder_2")}


def below(module: str, name: str) -> str:
    """The name of what lies below a module, with underscores where the module's has them for dots.

    >>> below("lora_unet_mid_block_norm", "weight")
    'lora_unet_mid_block_norm_weight'
    """
    return f"{module}{'.' if _FLAT.fullmatch(module) is None else '_'}{name}"


class Naming:
    """Finds the modules of one file in one model.

    All names are looked at together, because a prefix such as ``module.`` or ``text_encoder.`` may
    be a real submodule or a component's name, which only the other names tell.

    Args:
        modules: All names of modules in the file.
        layout: The model.

    Raises:
        TargetMismatchError: A name, or all names of a component, may stand for several modules.
    """

    def __init__(self, modules: Iterable[str], layout: Layout) -> None:
        """Decide which component of the model each component of the file is for."""
        self._layout = layout
        self._single = layout.components == ("",)
        given = list(modules)
        bare = _without_ddp(given, layout)
        self._names = {m: self._parse(b) for m, b in zip(given, bare, strict=True)}
        self._finders = {one: Finder(one, layout) for one in layout.components}
        self._components = self._only_one_each(self._choose())
        self._found: dict[str, Match | None] = {}

    def find(self, module: str) -> Match | None:
        """The target module that a name in the file stands for, or None."""
        if module not in self._found:
            name = self._name(module)
            component = self._component(name.label)
            finder = None if component is None else self._finders[component]
            self._found[module] = None if finder is None else finder.find(name)
        return self._found[module]

    def paths(self, module: str) -> Iterator[str]:
        """The names in the model, of targets or not, that a name in the file may stand for."""
        name = self._name(module)
        component = self._component(name.label)
        return iter(()) if component is None else self._finders[component].paths(name)

    def module(self, name: str) -> tuple[str, nn.Module] | None:
        """The module that a name in the file stands for, a target or not, after its own path."""
        modules = self._layout.modules
        return next(((p, modules[p]) for p in self.paths(name) if p in modules), None)

    def other_component(self, module: str, found: Iterable[str]) -> str:
        """The component of the file that ``module`` belongs to, if it is none of this model's.

        Args:
            module: A name in the file that stands for no target module.
            found: All names that do. A single model is the component of the file that these are of.

        Returns:
            What the file calls the component; ``""`` where the name should have been found.
        """
        label = self._name(module).label
        if not self._single:
            return "" if self._candidates(label) else label
        ours = {self._name(name).label for name in found}
        return label if ours and label not in ours else ""

    def _component(self, label: str) -> str | None:
        if label in self._components:
            return self._components[label]
        return next(iter(self._candidates(label)), None)

    def _name(self, module: str) -> Name:
        """One of the names, or one more of the same file, which settles nothing."""
        return self._names.get(module) or self._parse(module)

    def _parse(self, module: str) -> Name:
        unwrapped = without_wrappers(module)
        if unwrapped.startswith(PEFT_PREFIX) or (self._single and self._layout.find(module)):
            return Name("", module)
        match = _FLAT.fullmatch(unwrapped)
        if match is not None:
            label = match["label"] or _ANY_DENOISER
            return Name(_TEXT_ENCODERS.get(label, label), _flat_path(match["path"]), flat=True)
        component = unwrapped.removeprefix("module.").partition(".")
        if not self._single and component[0] in self._layout.components:
            return Name(component[0], component[2])
        match = _DOTTED.fullmatch(unwrapped)
        if match is None or (self._single and match["label"] in self._layout.others):
            return Name("", module)
        return Name(_TEXT_ENCODERS.get(match["label"], match["label"]), match["path"])

    def _candidates(self, label: str) -> tuple[str, ...]:
        """The components of the model that a component of the file may be."""
        ours = self._layout.components
        if self._single or not label:
            return ours
        if label in ours:
            return (label,)
        names = _DENOISERS if label in (*_DENOISERS, _ANY_DENOISER) else _INSTEAD.get(label, ())
        return tuple(name for name in names if name in ours)

    def _choose(self) -> dict[str, str | None]:
        """The component of the model for each component of the file, None where there is none."""
        chosen: dict[str, str | None] = {}
        for label in dict.fromkeys(name.label for name in self._names.values()):
            hits = {one: len(self._hits(one, label)) for one in self._candidates(label)}
            best = [one for one, count in hits.items() if count == max(hits.values())]
            if len(best) > 1 and hits[best[0]]:
                raise TargetMismatchError(
                    f"the adapter's module names are those of {' and of '.join(best)} alike; begin "
                    f"its keys with the component that is meant, such as {best[0] + '.'!r}"
                )
            chosen[label] = best[0] if best else None
        return chosen

    def _only_one_each(self, chosen: dict[str, str | None]) -> dict[str, str | None]:
        """Settle which of several components of the file is one component of the model.

        It is the one of whose modules the model lacks none.
        """
        for component in self._layout.components:
            hits = {
                label: self._hits(component, label)
                for label, one in chosen.items()
                if label and one == component
            }
            rivals = {label for label, found in hits.items() if found}
            if len(set().union(*hits.values())) == sum(map(len, hits.values())):
                continue  # What they speak of is not the same.
            totals = Counter(name.label for name in self._names.values())
            whole = {label for label in rivals if len(hits[label]) == totals[label]}
            if len(whole) != 1:
                raise TargetMismatchError(
                    f"what the adapter has for {' and for '.join(sorted(rivals))} fits "
                    f"{component or 'this model'} alike; give the SlotManager the components by "
                    f"name, such as {{{min(rivals)!r}: model}}"
                )
            chosen |= dict.fromkeys(rivals - whole)
        return chosen

    def _hits(self, component: str, label: str) -> set[int]:
        """The targets in ``component`` that the names under ``label`` stand for."""
        names = (name for name in self._names.values() if name.label == label)
        matches = (self._finders[component].find(name) for name in names)
        return {match.target for match in matches if match is not None}


def _flat_path(path: str) -> str:
    for segment in WRAPPER_SEGMENTS:
        path = path.replace(f"{segment}_", "")
    return path


def _without_ddp(names: list[str], layout: Layout) -> list[str]:
    """The names less the ``module.`` that DDP put before all, where all then are the model's own.

    One name alone cannot tell it from a real submodule called ``module``.
    """
    plain_names = [plain(name) for name in names]
    if not all(name.startswith("module.") for name in plain_names):
        return names
    own = {without_wrappers(alias) for target in layout for alias in target.aliases}
    if own.issuperset(plain_names):
        return names
    bare = [name.removeprefix("module.").removeprefix(PEFT_PREFIX) for name in plain_names]
    return bare if own.issuperset(bare) else names
