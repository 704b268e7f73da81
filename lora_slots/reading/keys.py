"""The names of tensors in adapter files: which module a key belongs to, and which part it is."""

from __future__ import annotations

import re

# How the parts of an update are spelt. PEFT may put an adapter's name in between.
_NAME = r"(?:\.[^.]+)?"
_PARTS = {
    "lora_A": rf"\.lora_A{_NAME}\.weight",
    "lora_B": rf"\.lora_B{_NAME}\.weight",
    "lora_bias": rf"\.lora_B{_NAME}\.bias",
    "magnitude": rf"\.lora_magnitude_vector{_NAME}",
    "alpha": r"\.alpha",
}
_KEY = re.compile(
    "(?P<module>.+)(?:" + "|".join(f"(?P<{part}>{text})" for part, text in _PARTS.items()) + ")"
)


def split_key(key: str) -> tuple[str, str] | None:
    """Split a key into the module as the file calls it and the part; None if it is no such key.

    >>> split_key("layers.0.q_proj.lora_A.default.weight")
    ('layers.0.q_proj', 'lora_A')
    """
    match = _KEY.fullmatch(key)
    if match is None or match.lastgroup is None:
        return None
    return match["module"], match.lastgroup
