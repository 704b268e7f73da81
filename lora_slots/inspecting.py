"""A path -> AdapterInfo, from the header and the config alone."""

from __future__ import annotations

from lora_slots.layout import PEFT_PREFIX, without_wrappers
from lora_slots.pairing import pair_up, settle_scaling
from lora_slots.reading import Source, read_header
from lora_slots.report import AdapterInfo
from lora_slots.settings import LoraSettings, whole_tensor_features


def inspect_adapter(path: Source) -> AdapterInfo:
    """Say what an adapter is, without a model and without reading its tensors.

    Args:
        path: A PEFT folder, a ``.safetensors`` file or a hub id.

    Raises:
        AdapterFileError: It is missing, damaged, or contradicts itself.
        UnsupportedAdapterError: It uses a feature that is not applied here.
    """
    raw = read_header(path)
    pairs, extras = pair_up(raw)
    config = raw.config or {}
    settings = None if raw.config is None else LoraSettings.of(raw.config, raw.source)
    names = {without_wrappers(pair.module).removeprefix(PEFT_PREFIX): pair for pair in pairs}
    tensors = [tensor for pair in pairs for tensor in (pair.lora_A, pair.lora_B)]
    features = whole_tensor_features(config)
    if extras:
        features.append(f"{len(extras)} tensors that are not LoRA")
    return AdapterInfo(
        source=raw.source,
        base_model=str(config.get("base_model_name_or_path") or ""),
        ranks={name: pair.rank for name, pair in names.items()},
        scaling={name: settle_scaling(pair, name, settings, raw) for name, pair in names.items()},
        dtypes=tuple(dict.fromkeys(tensor.dtype for tensor in tensors)),
        nbytes=raw.nbytes,
        features=tuple(features),
    )
