"""The names of tensors in adapter files: which module a key belongs to, and which part it is.

The one table of how every trainer spells the parts of an update.
"""

from __future__ import annotations

import functools
import re

# PEFT may put an adapter's name in between.
_NAME = r"(?:\.[^.]+)?"
# PEFT; kohya; diffusers before PEFT, its UNet's layers and its text encoder's; xlabs's Flux.
_HALF = (
    rf"lora_{{peft}}{_NAME}\.{{kind}}"
    r"|(?:lora_|lora\.|lora_linear_layer\.|(?<=_lora\.)|(?<=_lora[12]\.)){old}\.{kind}"
)
# What comes after the dot that ends the module's name.
_PARTS = {
    "lora_A": _HALF.format(peft="A", old="down", kind="weight") + rf"|lora_embedding_A{_NAME}",
    "lora_B": _HALF.format(peft="B", old="up", kind="weight") + rf"|lora_embedding_B{_NAME}",
    "lora_mid": r"lora_mid\.weight",
    "lora_bias": _HALF.format(peft="B", old="up", kind="bias"),
    "magnitude": rf"lora_magnitude_vector{_NAME}(?:\.weight)?",
    "dora_scale": "dora_scale",
    "alpha": "alpha",
    **{
        part: part + _NAME
        for part in (
            "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2",
            "lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b",
            "lokr_t1", "lokr_t2",
        )
    },
    **{part: part for part in ("diff", "diff_b", "w_norm", "b_norm")},
    "trainable_tokens": (
        r"(?:token_adapter\.|(?<!\.token_adapter\.))trainable_tokens_delta" + _NAME
    ),
}  # fmt: skip
_KEY = re.compile(
    r"(?P<module>.+)\.(?:" + "|".join(f"(?P<{part}>{text})" for part, text in _PARTS.items()) + ")"
)

# Attention processors of diffusers before 0.20 held the pairs of the projections beside them.
_PROCESSOR = re.compile(
    r"(?P<parent>.+?)(?:\.processor)?\.(?P<layer>to_q|to_k|to_v|to_out|add_k_proj|add_v_proj)_lora\."
    r"(?P<rest>down\.weight|up\.weight|alpha)"
)
_IN_UNET = {"to_out": "to_out.0"}
_IN_TEXT_ENCODER = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


# The same names come back in every adapter of a base model.
@functools.lru_cache(maxsize=2**16)
def split_key(key: str) -> tuple[str, str] | None:
    """Split a key into the module as the file calls it and the part; None if it is no such key.

    The parts are ``lora_A``, ``lora_B``, ``lora_mid``, ``lora_bias``, ``alpha``; ``magnitude``
    (PEFT's, one element an output) and ``dora_scale`` (kohya's, whose shape tells its axis); those
    of LoHa and LoKr under LyCORIS's own names; ``diff``, ``diff_b``, ``w_norm`` and ``b_norm``,
    added to the base weight or bias; and ``trainable_tokens``, rows in the place of an embedding's.

    >>> split_key("layers.0.q_proj.lora_A.default.weight")
    ('layers.0.q_proj', 'lora_A')
    >>> split_key("lora_unet_mid_block_attn.lora_up.weight")
    ('lora_unet_mid_block_attn', 'lora_B')
    >>> split_key("mid_block.attn1.processor.to_out_lora.down.weight")
    ('mid_block.attn1.to_out.0', 'lora_A')
    """
    if "_lora." in key:
        key = _PROCESSOR.sub(_beside_processor, key)
    match = _KEY.fullmatch(key)
    if match is None or match.lastgroup is None:
        return None
    return match["module"], match.lastgroup


def _beside_processor(match: re.Match[str]) -> str:
    """The key under the name of the projection itself, as later versions of diffusers write it."""
    parent, layer = match["parent"], match["layer"]
    names = _IN_TEXT_ENCODER if parent.endswith("self_attn") else _IN_UNET
    part = "alpha" if match["rest"] == "alpha" else f"lora.{match['rest']}"
    return f"{parent}.{names.get(layer, layer)}.{part}"
