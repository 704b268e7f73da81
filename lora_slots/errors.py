"""Every error that lora_slots raises on purpose; each is also the builtin a caller expects."""


class LoraSlotsError(Exception):
    """Base of all errors raised by lora_slots. Whatever raised it has changed nothing."""


class AdapterFileError(LoraSlotsError, ValueError):
    """The adapter's file is missing, damaged, or contradicts itself."""


class UnsupportedAdapterError(LoraSlotsError, ValueError):
    """The adapter uses a feature that would change the maths and that is not applied here."""


class TargetMismatchError(LoraSlotsError, ValueError):
    """The adapter's (or the manager's) modules or shapes do not fit this model."""


class RankTooLargeError(LoraSlotsError, ValueError):
    """The adapter's rank is above the manager's ``max_rank``."""


class ArgumentError(LoraSlotsError, ValueError):
    """An argument has a value that has no meaning here."""


class AttachError(LoraSlotsError, RuntimeError):
    """The model is in a state in which slots cannot be attached, used or written."""


class NoFreeSlotError(LoraSlotsError, RuntimeError):
    """All slots hold an adapter and the name to load is a new one, or too few rows are free."""


class HoldError(LoraSlotsError, RuntimeError):
    """Adapters were to change in a thread that holds them as they are."""


class AdapterInUseError(LoraSlotsError, RuntimeError):
    """The adapter is routed to rows of a batch."""


class RecompileError(LoraSlotsError, RuntimeError):
    """Compiled code was compiled again, or ran eagerly, where that was ruled out.

    Attributes:
        guard: The guard that failed, as Dynamo spells it, or None where no guard was the cause.
    """

    def __init__(self, message: str, guard: str | None = None) -> None:
        """Store the failing guard beside the message."""
        super().__init__(message)
        self.guard = guard


class UnknownAdapterError(LoraSlotsError, LookupError):
    """No adapter of that name is loaded."""


class NotAttachedError(LoraSlotsError, LookupError):
    """The model has no SlotManager."""
