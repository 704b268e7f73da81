"""Names that transformers has changed since an adapter was saved, by transformers' own tables."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from lora_slots.errors import UnsupportedAdapterError
from lora_slots.layout import Layout, spellings
from lora_slots.reading import RawAdapter

# One expert of a mixture, as a module.
_EXPERT = re.compile(r".+\.experts\.\d+(?=\.)")
# What a config says about modules and parameters.
_SPEAKING = (
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "target_parameters",
)  # fmt: skip


def renaming_of(model: nn.Module) -> Callable[[str], str]:
    """The function from a module's name in older checkpoints of ``model`` to its name now.

    transformers 5 gave ViT, DINOv2, CLIP and others new module names, and renames those of a
    checkpoint as it loads it. PEFT knows these tables too, but only asks for those of a whole
    architecture, not for those of a class of model such as ViT's.

    Source: ``transformers.conversion_mapping.get_model_conversion_mapping``.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return _unchanged
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # transformers 4 has the old names.
        return _unchanged
    renamings = [
        entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)
    ]

    def rename(name: str) -> str:
        key, _ = rename_source_key(f"{name}.weight", renamings, [])
        return key.removesuffix(".weight")

    return rename


def _unchanged(name: str) -> str:
    return name


def with_fused_experts(raw: RawAdapter, layout: Layout) -> RawAdapter:
    """``raw`` for the experts of transformers 5, where it is for those of transformers 4.

    Experts that were modules of their own have become one parameter. PEFT brings the tensors and
    the config of an adapter into that form: A one above the other, B as a block diagonal.

    Source: ``peft.utils.transformers_weight_conversion``.

    Raises:
        UnsupportedAdapterError: PEFT cannot, since only one of two fused layers is adapted.
    """
    if layout.components != ("",):
        return raw
    model = layout.part("")
    old = [match[0] for key in raw.tensors if ".experts." in key and (match := _EXPERT.match(key))]
    if not old or raw.config is None or layout.has_module(spellings(old[0])[-1]):
        return raw
    try:
        from peft import LoraConfig
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # transformers 4 has the experts as they were.
        return raw
    config = LoraConfig(**{key: raw.config[key] for key in _SPEAKING if raw.config.get(key)})
    try:
        conversion.convert_peft_config_for_transformers(config, model, None)
        tensors = conversion.convert_peft_adapter_state_dict_for_transformers(
            model, config, dict(raw.tensors)
        )
    except ValueError as error:
        raise UnsupportedAdapterError(
            f"{raw.source} was made for the experts of transformers 4, of which PEFT cannot make "
            f"those of this model: {error}"
        ) from error
    changed = {key: getattr(config, key) for key in ("rank_pattern", "alpha_pattern")}
    changed["target_parameters"] = sorted(config.target_parameters or ())
    return replace(raw, tensors=tensors, config={**raw.config, **changed})
