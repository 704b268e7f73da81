"""Which weight file a path or a hub id means."""

from __future__ import annotations

import os

from lora_slots.errors import AdapterFileError
from lora_slots.reading.hub import download, looks_like_hub_id

CONFIG_NAME = "adapter_config.json"
SAFETENSORS_NAMES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
PICKLE_NAMES = ("adapter_model.bin", "pytorch_lora_weights.bin")
# What PEFT and diffusers call their files, the first that is there being read.
WEIGHT_NAMES = SAFETENSORS_NAMES + PICKLE_NAMES


def locate(path: str, *, allow_pickle: bool = False) -> str:
    """The weight file that ``path``, a file, a folder or a hub id, means.

    Of a folder it is ``adapter_model.safetensors``, else ``pytorch_lora_weights.safetensors``, else
    the only ``.safetensors`` file whatever its name, else ``adapter_model.bin``, else
    ``pytorch_lora_weights.bin``. Folders within are not looked into.

    Raises:
        AdapterFileError: Nothing is there, or several files without one of these names are, or the
            folder cannot be read.
    """
    if (usual := usual_file(path)) is not None:
        return usual
    if not os.path.exists(path):
        if not looks_like_hub_id(path):
            raise AdapterFileError(f"{path} does not exist")
        names = WEIGHT_NAMES if allow_pickle else SAFETENSORS_NAMES
        path = download(path, [CONFIG_NAME, *names])
    if not os.path.isdir(path):
        return path
    try:
        names_found = sorted(os.listdir(path))
    except OSError as error:
        raise AdapterFileError(f"{path} cannot be read: {error.strerror or error}") from error
    others = [name for name in names_found if name.endswith(".safetensors")]
    named = [name for name in SAFETENSORS_NAMES if name in others]
    if not named and len(others) > 1:
        raise AdapterFileError(
            f"{path} must hold {' or '.join(SAFETENSORS_NAMES)}, or a single .safetensors file: it "
            f"holds {', '.join(others)}; pass the path of one"
        )
    chosen = [*named, *others, *(name for name in PICKLE_NAMES if name in names_found)]
    if not chosen:
        raise AdapterFileError(_nothing_in(path, names_found))
    return os.path.join(path, chosen[0])


def usual_file(path: str) -> str | None:
    """The file that a folder's others do not matter beside, if it is there."""
    usual = os.path.join(path, SAFETENSORS_NAMES[0])
    return usual if os.path.isfile(usual) else None


def _nothing_in(path: str, names: list[str]) -> str:
    text = (
        f"{path} must hold {' or '.join(SAFETENSORS_NAMES)}, or a single .safetensors file: it "
        "holds neither"
    )
    nested = [name for name in names if _holds_weights(os.path.join(path, name))]
    if not nested:
        return text
    return f"{text}, but {', '.join(nested[:3])} in it does; pass the path of that folder"


def _holds_weights(path: str) -> bool:
    try:
        names = os.listdir(path)
    except OSError:  # no folder, or none that may be read
        return False
    return any(name in WEIGHT_NAMES or name.endswith(".safetensors") for name in names)
