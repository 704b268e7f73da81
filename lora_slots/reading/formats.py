"""The families of adapter files: which one a file is of, told by its keys and its header alone.

All families end up as the same parts (`keys`), whose modules go by names that only a model can tell
apart; so a family is known by how it looks, and needs no reader of its own beyond that.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from lora_slots.errors import AdapterFileError, UnsupportedAdapterError
from lora_slots.reading.configs import METADATA_KEYS
from lora_slots.reading.keys import split_key
from lora_slots.reading.raw import RawAdapter

_COMPONENT = r"(?:unet|transformer|prior|text_encoder(?:_\d)?)"
_WRAPPERS = r"(?:(?:module|_orig_mod|_fsdp_wrapped_module)\.)*"


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _lines(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)


@dataclass(frozen=True)
class Family:
    """A family of files.

    Attributes:
        name: What users call it.
        key: A pattern that is found in its keys, one a line.
        header: A pattern that is found in its header, one ``name=text`` a line.
    """

    name: str
    key: re.Pattern[str] | None = None
    header: re.Pattern[str] | None = None

    def has(self, keys: str, header: str) -> bool:
        """Whether a file with these keys and this header is of this family."""
        return any(
            pattern is not None and pattern.search(lines) is not None
            for pattern, lines in ((self.key, keys), (self.header, header))
        )


# The first that has a file is its own: headers name a trainer, keys only what it imitates.
FAMILIES = (
    Family("ai-toolkit", header=_lines("^software=.*ai-toolkit")),
    Family("OneTrainer", header=_lines("^ot_")),
    Family("PEFT", _lines(r"^base_model\.model\.")),
    Family("LyCORIS", _lines(r"^lycoris_|\.(?:hada_|lokr_|diff$|diff_b$|[wb]_norm$)")),
    Family("kohya", _lines(r"^lora_(?:prior_)?(?:unet|transformer|te\d?)_")),
    Family(
        "older diffusers", _lines(r"(?:_lora|\.lora|\.lora_linear_layer)\.(?:down|up)\.weight$")
    ),
    Family("diffusion_model", _lines(rf"^{_WRAPPERS}(?:model\.)?diffusion_model\.")),
    Family(
        "diffusers",
        _lines(rf"^{_WRAPPERS}{_COMPONENT}\..+\.lora_"),
        header=_lines(f"^{METADATA_KEYS[0]}="),
    ),
)

# A piece of a key that only another algorithm uses.
FOREIGN = {
    "oft_": "OFT",
    "boft_": "BOFT",
    "vera_lambda": "VeRA",
    "randlora_lambda": "RandLoRA",
    "ia3_l": "IA3",
    "on_input": "IA3",
    "hra_u": "HRA",
    "fourierft_spectrum": "FourierFT",
    "gralora_A": "GraLoRA",
    "lora_E": "AdaLoRA",
    "glora_": "GLoRA",
    "vblora_": "VB-LoRA",
    "delora_": "DeLoRA",
    "poly_lora_": "Polytropon",
    "miss_block": "MiSS",
    "bone_block": "Bone",
    "shira_weight": "SHiRA",
    "c3a_kernel": "C3A",
    "lambda_layer": "T-LoRA",
}
_FOREIGN_PIECE = _lines(rf"(?:^|[._])({'|'.join(map(re.escape, FOREIGN))})")


def format_of(raw: RawAdapter) -> str:
    """The name of the family that ``raw`` belongs to; ``PEFT`` where nothing says otherwise."""
    if raw.config is not None and METADATA_KEYS[0] not in raw.metadata:
        return "PEFT"
    keys = _joined(raw.tensors)
    header = _joined(f"{name}={text!r}" for name, text in raw.metadata.items())
    return next((family.name for family in FAMILIES if family.has(keys, header)), "PEFT")


def check_keys(raw: RawAdapter) -> None:
    """Refuse what holds nothing that could be a low-rank update.

    Raises:
        AdapterFileError: There are no LoRA tensors at all.
        UnsupportedAdapterError: The names are those of another algorithm.
    """
    foreign = _foreign(tuple(raw.tensors))
    if foreign is not None:
        algorithm, key = foreign
        raise UnsupportedAdapterError(
            f"{raw.source} uses {algorithm}, as its key {key!r} shows, which is no low-rank update "
            "that slots can hold"
        )
    if not any("lora_" in key or split_key(key) for key in raw.tensors):
        keys = ", ".join(repr(key) for key in list(raw.tensors)[:3]) or "none at all"
        raise AdapterFileError(f"{raw.source} holds no LoRA tensors; its keys are {keys}")


# The same names come back in every adapter of a base model.
@functools.lru_cache(maxsize=64)
def _foreign(keys: tuple[str, ...]) -> tuple[str, str] | None:
    """An algorithm that is not applied here, and the key that tells, if there is one."""
    lines = _joined(keys)
    found = _FOREIGN_PIECE.search(lines)
    if found is not None:
        start = lines.rfind("\n", 0, found.start(1)) + 1
        return FOREIGN[found[1]], lines[start:].partition("\n")[0]
    # LyCORIS's GLoRA has two pairs, whose names alone could be those of layers.
    halves = {key for key in keys if key.endswith((".a1.weight", ".b1.weight"))}
    glora = next((k for k in keys if k in halves and _other_half(k) in halves), "")
    return ("GLoRA", glora) if glora else None


def _other_half(key: str) -> str:
    return f"{key.removesuffix('a1.weight')}b1.weight"
