"""What a file calls a module -> the module of that name in one component of the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lora_slots.errors import TargetMismatchError
from lora_slots.layout import PEFT_PREFIX, Layout, spellings, without_wrappers
from lora_slots.resolve.renamed import renaming_of

# A level of CLIP's text encoder that transformers 5 removed from some of its classes.
_TEXT_MODEL = "text_model"


@dataclass(frozen=True)
class Match:
    """A module of a file that the model has.

    Attributes:
        target: The index of the target module in the layout.
        name: The name within its component, of which the patterns of a config speak.
    """

    target: int
    name: str


@dataclass(frozen=True)
class Name:
    """What a file calls a module.

    Attributes:
        label: The component that it names, or ``""``.
        path: The rest of the name.
        flat: Whether underscores stand for dots.
    """

    label: str
    path: str
    flat: bool = False

    @property
    def in_text_encoder(self) -> bool:
        """Whether it names a text encoder."""
        return self.label.startswith("text_encoder")


class Finder:
    """Finds names within one component of the model."""

    def __init__(self, component: str, layout: Layout) -> None:
        """Find names in ``component``; ``""`` for a single model."""
        self._layout = layout
        self._component = component
        self._prefix = f"{component}." if component else ""
        self._known: dict[Name, Match | None] = {}

    def find(self, name: Name) -> Match | None:
        """The target module that ``name`` stands for, or None."""
        if name not in self._known:
            self._known[name] = self._find_flat(name) if name.flat else self._find_dotted(name)
        return self._known[name]

    def paths(self, name: Name) -> Iterator[str]:
        """The names in the model that ``name`` may stand for, the most literal first."""
        if name.flat:
            for flat in self._flat_variants(name):
                yield from self._flat.get(flat, ())
        else:
            for path in self._variants(name):
                yield from spellings(self._prefix + path)

    def _find_dotted(self, name: Name) -> Match | None:
        for path in self._variants(name):
            found = self._layout.find(self._prefix + path)
            if found is not None:
                literal = found[1].removeprefix(self._prefix)
                return Match(found[0], literal if path == name.path else plain(name.path))
        return None

    def _variants(self, name: Name) -> Iterator[str]:
        """The paths that a name may stand for, the most literal first."""
        yield name.path
        path = plain(name.path)
        yield path
        if name.in_text_encoder:
            yield from _with_and_without(f"{_TEXT_MODEL}.", path)
        yield self._rename(path)

    @functools.cached_property
    def _rename(self) -> Callable[[str], str]:
        return renaming_of(self._layout.part(self._component))

    def _find_flat(self, name: Name) -> Match | None:
        for path in self._flat_variants(name):
            found = self._flat.get(path, {})
            targets = {index for index in found.values() if index is not None}
            if targets and len(set(found.values())) > 1:
                raise TargetMismatchError(
                    f"the adapter's module {name.path!r} may be {' or '.join(sorted(found))} of "
                    "this model, which underscores cannot tell apart; save it with dots in its keys"
                )
            for index in targets:
                return Match(index, self._layout.targets[index].path_in_component)
        return None

    def _flat_variants(self, name: Name) -> Iterator[str]:
        yield name.path
        yield name.path.removeprefix("module_")
        if name.in_text_encoder:
            yield from _with_and_without(f"{_TEXT_MODEL}_", name.path)

    @functools.cached_property
    def _flat(self) -> dict[str, dict[str, int | None]]:
        """By each name with underscores: the modules that it stands for, each with its target."""
        flat: dict[str, dict[str, int | None]] = {}
        modules: dict[str, int | None] = dict.fromkeys(map(without_wrappers, self._layout.others))
        for index, target in enumerate(self._layout):
            modules |= dict.fromkeys(map(without_wrappers, target.aliases), index)
        for path, number in modules.items():
            if path.startswith(self._prefix):
                name = path.removeprefix(self._prefix).replace(".", "_")
                flat.setdefault(name, {})[path] = number
        return flat


def _with_and_without(level: str, path: str) -> tuple[str, str]:
    return path.removeprefix(level), level + path


def plain(name: str) -> str:
    """A name less what wrapped the model, and PEFT's prefix."""
    return without_wrappers(name).removeprefix(PEFT_PREFIX)
