"""Hub ids: huggingface_hub fetches the files, which are then read like any others."""

from __future__ import annotations

import os
import re

from lora_slots.errors import AdapterFileError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def looks_like_hub_id(path: str) -> bool:
    """Whether a path that does not exist may be a hub id: ``owner/name``, ``owner`` no folder."""
    return (
        _HUB_ID.fullmatch(path) is not None
        and not path.endswith((".safetensors", ".bin", ".pt", ".json"))
        and not os.path.exists(path.split("/")[0])
    )


def download(hub_id: str, names: list[str]) -> str:
    """Fetch the files called ``names`` of a hub repository, or find them in the local cache.

    Returns:
        The folder that holds them.

    Raises:
        AdapterFileError: They cannot be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(hub_id, allow_patterns=names)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise AdapterFileError(
            f"{hub_id} is neither a path that exists nor a hub id that can be fetched: {reason}"
        ) from error
