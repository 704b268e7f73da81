"""States of a model in which slots would be ignored, frozen or in the way."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lora_slots.attach.components import is_wrapper
from lora_slots.errors import AttachError
from lora_slots.layers.swap import CHILD_NAME, has_foreign_forward, has_slots
from lora_slots.layout import Layout, Target

_FSDP_CLASSES = ("FullyShardedDataParallel", "FSDPModule")
# The projections that diffusers' attention no longer calls once it has made the fused one.
_FUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
}


def refuse_model(model: nn.Module) -> None:
    """Refuse models whose layers already carry adapters or are sharded.

    Raises:
        AttachError: Says which, and what to do.
    """
    for path, module in model.named_modules():
        if _is_peft_layer(module):
            merged = getattr(module, "merged_adapters", None)
            raise AttachError(
                f"{path} is a PEFT "
                f"layer{f' with {merged} merged into its base' if merged else ''}; take PEFT's "
                "adapters away first: model = peft_model.unload()"
            )
        if any(base.__name__ in _FSDP_CLASSES for base in type(module).__mro__):
            raise AttachError(
                f"{path or 'the model'} is sharded by FSDP, which is not supported yet"
            )


def refuse_fast_path(layout: Layout) -> None:
    """Refuse targets that `nn.TransformerEncoderLayer` would read past in inference.

    Raises:
        AttachError: The fast path is enabled and a target module is inside such a layer.
    """
    if layout.in_encoder_layers and torch.backends.mha.get_fastpath_enabled():
        raise AttachError(
            f"{layout.in_encoder_layers[0].path} is inside an nn.TransformerEncoderLayer, whose "
            "fast path reads its weight and never calls it, so that adapters would be ignored; "
            "call torch.backends.mha.set_fastpath_enabled(False) first"
        )


def refuse_fused_projections(attentions: Iterable[nn.Module], layout: Layout) -> None:
    """Refuse targets whose weights diffusers' attention has copied into a fused projection.

    Args:
        attentions: The modules that `can_fuse`.
        layout: The targets.

    Raises:
        AttachError: ``fuse_qkv_projections()`` was called on the model.
    """
    fused = [module for module in attentions if _runs_fused(module)]
    if not fused:
        return
    silent = {
        attention._modules.get(name)
        for attention in fused
        for made, names in _FUSED.items()
        for name in names
        if made in attention._modules
    }
    for target in layout:
        if target.module in silent:
            raise AttachError(
                f"{target.path} is not called while its attention runs a fused projection, so that "
                "adapters would be ignored; call unfuse_qkv_projections() on the pipeline or model "
                "first"
            )


def refuse_freezing(modules: Iterable[nn.Module]) -> None:
    """Refuse inductor's ``freezing``, which bakes buffers into compiled code as constants.

    It is seen where it is set globally, in the options of a module's ``compile()``, or in those of
    the ``torch.compile`` wrapper that is given here; not in those of a wrapper made elsewhere.

    Raises:
        AttachError: It is on.
    """
    import torch._inductor.config as inductor

    if inductor.freezing or any(map(_freezes, modules)):
        raise AttachError(
            "inductor's option freezing is on, which makes constants of the slots, so that swaps "
            "would be ignored; turn torch._inductor.config.freezing off, or compile without it"
        )


def refuse_unattachable(target: Target) -> None:
    """Refuse a layer that has slots already, hides its class's forward, or has no plain weight.

    Raises:
        AttachError: Says which, and what to do.
    """
    module, weight = target.module, target.weight
    if has_slots(module) or hasattr(module, CHILD_NAME):
        raise AttachError(
            f"{target.path} already has an attribute {CHILD_NAME!r}; a module takes slots once: "
            "use SlotManager.of(model), or detach() the first manager"
        )
    if has_foreign_forward(module):
        raise AttachError(
            f"{target.path} has a forward set on the instance, which would hide its slots; remove "
            "it (del module.forward) or set it on the class"
        )
    if nn.parameter.is_lazy(weight):
        raise AttachError(f"{target.path} is not initialised yet; run the model once first")
    if _is_dtensor(weight):
        raise AttachError(f"{target.path} has a DTensor weight, which is not supported yet")


def can_fuse(module: nn.Module) -> bool:
    """Whether a module is an attention of diffusers that may run a fused projection some day."""
    return "fused_projections" in vars(module) or hasattr(type(module), "fuse_projections")


def compiled_in_place(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that were compiled by their ``compile()``: hundreds are asked before every load."""
    return [module for module in modules if "_compiled_call_impl" in vars(module)]


def _runs_fused(module: nn.Module) -> bool:
    """Whether a module is an attention of diffusers that runs a fused projection."""
    if vars(module).get("fused_projections") is not True:
        return False
    legacy: Any = sys.modules.get("diffusers.models.attention_processor")
    if legacy is None or not isinstance(module, legacy.Attention):
        return True
    # That class keeps its flag when the processor that heeds it is gone.
    return "Fused" in type(module.processor).__name__


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is wrapped by `torch.compile` or was compiled in place."""
    return is_wrapper(module) or module._compiled_call_impl is not None


def _freezes(module: nn.Module) -> bool:
    compiled: Any = vars(module).get("_compiled_call_impl")
    if compiled is None and "_orig_mod" in module._modules:
        compiled = module
    if compiled is None:
        return False
    options = getattr(compiled, "get_compiler_config", lambda: None)()
    return bool((options or {}).get("freezing", False))


def _is_peft_layer(module: nn.Module) -> bool:
    tuners_utils: Any = sys.modules.get("peft.tuners.tuners_utils")
    return tuners_utils is not None and isinstance(module, tuners_utils.BaseTunerLayer)


def _is_dtensor(weight: Tensor) -> bool:
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(weight, tensor.DTensor)
