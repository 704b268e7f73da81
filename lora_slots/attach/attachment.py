"""One model with slots, and whose it is: a manager is kept on the model that it is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from lora_slots.attach import refusals
from lora_slots.attach.attaching import attach, detach, warn_if_compiled
from lora_slots.attach.components import all_modules, components_of, parts_of, root_of, unwrap
from lora_slots.attach.survey import survey
from lora_slots.attach.unroutable import refuse_unroutable
from lora_slots.errors import AttachError, NotAttachedError
from lora_slots.options import Options

_ATTRIBUTE = "_lora_slots_manager"
_Manager = TypeVar("_Manager")


class Attachment:
    """The slots of a model, and the manager that they belong to.

    Attributes:
        root: The model, or what holds its components.
        layout: Its target modules, with slots; gone once detached.
    """

    def __init__(self, model: object, options: Options) -> None:
        """Give ``model`` slots; if it is refused, nothing of it has changed.

        Args:
            model: As for `SlotManager`. Changed in place.
            options: What slots to give, and which layers.

        Raises:
            ArgumentError: It is no model.
            AttachError: It has a manager already, or is in a state in which slots would be ignored
                or are not supported.
            TargetMismatchError: The options name nothing in it, or what takes no adapters.
        """
        given, self.root = components_of(model), root_of(model)
        for name, part in parts_of(self.root).items():
            if _ATTRIBUTE in vars(part):
                raise AttachError(
                    f"{name or 'this model'} already has a SlotManager; use SlotManager.of(model), "
                    "or detach() it first"
                )
        refusals.refuse_model(self.root)
        refusals.refuse_freezing(all_modules(given))
        self.layout = survey(
            self.root,
            options.target_modules,
            token_rows=options.token_rows,
            full_modules=options.full_modules,
            bias=options.bias,
        )
        self._modules = tuple(self.root.modules())
        self._attentions = tuple(filter(refusals.can_fuse, self._modules))
        refusals.refuse_fused_projections(self._attentions, self.layout)
        if options.routing:
            refuse_unroutable(self.root, self.layout)
        warn_if_compiled(all_modules(given))
        attach(self.layout, options)
        self._manager: object = None

    def belong_to(self, manager: object) -> None:
        """Let the model know its manager, so that copies and pickles of it bring theirs along."""
        self._manager = manager
        for owner in self._owners():
            vars(owner)[_ATTRIBUTE] = manager

    def refuse_detached(self) -> None:
        """Refuse a manager whose model is no longer its own.

        Raises:
            AttachError: It was detached.
        """
        if vars(self.root).get(_ATTRIBUTE) is not self._manager:
            raise AttachError("this SlotManager was detached; build a new one")

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Whatever fails because another thread detaches meanwhile is that it was detached.

        Raises:
            AttachError: It was detached.
        """
        self.refuse_detached()
        try:
            yield
        except Exception:
            self.refuse_detached()
            raise

    def refuse_ignored_slots(self) -> None:
        """Refuse states that the model has come into since, in which slots would be ignored.

        Raises:
            AttachError: Says which, and what to do.
        """
        refusals.refuse_freezing(refusals.compiled_in_place(self._modules))
        refusals.refuse_fast_path(self.layout)
        refusals.refuse_fused_projections(self._attentions, self.layout)

    def detach(self) -> None:
        """Take the slots and the manager away from the model, and keep nothing of them alive.

        Raises:
            AttachError: The class of a target module was changed since. Nothing is detached.
        """
        detach(self.layout)
        for owner in self._owners():
            del vars(owner)[_ATTRIBUTE]
        del self.layout, self._modules, self._attentions

    def _owners(self) -> Iterable[nn.Module]:
        """The modules that know their manager: the root and all components."""
        return dict.fromkeys((self.root, *parts_of(self.root).values()))

    def __str__(self) -> str:
        """The classes of the components."""
        return ", ".join(
            f"{f'{name}=' if name else ''}{type(part).__name__}"
            for name, part in parts_of(self.root).items()
        )


def manager_of(model: object, cls: type[_Manager]) -> _Manager:
    """The manager that a model, plain or compiled, belongs to; or its components, or one.

    Raises:
        NotAttachedError: It has none, or its components have several.
    """
    parts = [unwrap(part) for part in components_of(model).values()]
    managers = {manager for part in parts if (manager := vars(part).get(_ATTRIBUTE))}
    if len(managers) > 1:
        raise NotAttachedError(
            f"the components of this {type(model).__name__} have {len(managers)} SlotManagers; "
            "ask for that of one component, such as SlotManager.of(pipe.unet)"
        )
    manager = next(iter(managers), None)
    if not isinstance(manager, cls):
        what = parts[0] if isinstance(model, nn.Module) else model
        raise NotAttachedError(
            f"this {type(what).__name__} has no SlotManager; build one with "
            "SlotManager(model, max_rank=...)"
        )
    return manager
