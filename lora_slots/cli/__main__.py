"""The command line, ``lora-slots``: needs typer and rich, which the extra ``cli`` brings."""

from __future__ import annotations

import sys


def main() -> None:
    """Run ``lora-slots``, or say in one sentence what to install for it."""
    try:
        from lora_slots.cli.commands import app
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("typer", "rich"):
            raise
        print(
            f"lora-slots needs {library}, which is not installed; install lora-slots[cli]",
            file=sys.stderr,
        )
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
