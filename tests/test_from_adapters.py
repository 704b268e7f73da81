"""`SlotManager.from_adapters` turns on what its adapters need, whatever they are, and no more."""

from __future__ import annotations

from pathlib import Path
from pipes import PIPES, write_styles
from typing import Any

import pytest
import torch
from adapter_files import write_file
from dora_files import write_dora
from foreign_files import ForeignFile, flux
from format_files import kohya
from lycoris_files import convolutions, write_peft
from peft import LoHaConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from toys import (
    TINY,
    TOY_MODULES,
    WEIGHTS,
    pairs,
    slot_buffers,
    tensors_of,
    toy,
    toy_folder,
    write_adapter,
    write_folder,
)
from whole_files import X, by_peft, headed, write_trained

from lora_slots import SlotManager, TargetMismatchError

Q, V = TOY_MODULES[:2]


def buffers(model: nn.Module) -> set[str]:
    """The kinds of buffers that slots have."""
    return {name.rpartition(".")[2] for name in slot_buffers(model)}


def slotted(model: nn.Module) -> set[str]:
    """The paths of the modules that have slots."""
    return {name.partition(".lora_slots.")[0] for name in slot_buffers(model)}


def assert_fits(model: nn.Module, *paths: Path, **kwargs: Any) -> SlotManager:
    """A manager for these adapters holds nothing, and then takes every one of them."""
    manager = SlotManager.from_adapters(model, paths, **kwargs)
    assert manager.loaded_adapters == ()
    assert not any(buffer.any() for buffer in slot_buffers(model).values())
    for path in paths:
        manager.load(path)
    return manager


def test_plain_adapters_cost_no_options(tmp_path: Path) -> None:
    model = toy()
    manager = assert_fits(model, toy_folder(tmp_path / "a", 2), toy_folder(tmp_path / "b", 5))
    assert manager.status().max_rank == 5
    assert buffers(model) == {"lora_A", "lora_B", "scaling"}


def test_one_dora_adapter_turns_dora_on(tmp_path: Path) -> None:
    model = toy()
    dora = write_dora(tmp_path / "dora", toy(), r=2, target_modules=["q_proj"])
    assert_fits(model, toy_folder(tmp_path / "plain", 3), dora)
    assert buffers(model) == {"lora_A", "lora_B", "scaling", "dora"}


@pytest.mark.parametrize("key", [f"{Q}.lora_B.bias", f"{Q}.base_layer.bias", f"{Q}.diff_b"])
def test_a_bias_turns_bias_on(key: str, tmp_path: Path) -> None:
    model = toy(bias=True)
    prefix = "" if key.endswith("diff_b") else "base_model.model."
    tensors = tensors_of(pairs({Q: 2}), prefix) | {prefix + key: torch.ones(6)}
    assert_fits(model, write_file(tmp_path / "a.safetensors", tensors))
    assert "lora_bias" in buffers(model)
    assert slotted(model) == {Q}


def test_modules_to_save_become_full_modules(tmp_path: Path) -> None:
    model = TINY["bert"].build()
    saved = {"target_modules": ["query"], "modules_to_save": ["pooler"]}
    write_adapter(tmp_path, TINY["bert"].build(), r=2, **saved)
    weight = {k: v + 1 for k, v in load_file(tmp_path / WEIGHTS).items() if "pooler" in k}
    write_folder(tmp_path, load_file(tmp_path / WEIGHTS) | weight, None)
    assert_fits(model, tmp_path)
    assert "full" in buffers(model)
    assert "pooler.dense" in slotted(model)


def test_a_whole_tensor_that_changes_nothing_gets_no_room(tmp_path: Path) -> None:
    model = toy()
    copy = {f"base_model.model.{V}.weight": model.get_submodule(V).weight.detach().clone()}
    zeros = {f"base_model.model.{V}.diff": torch.zeros(6, 8)}
    tensors = tensors_of(pairs({Q: 2})) | copy | zeros
    manager = assert_fits(model, write_file(tmp_path / "a.safetensors", tensors))
    assert buffers(model) == {"lora_A", "lora_B", "scaling"}
    assert slotted(model) == {Q}
    assert len(manager.check(tmp_path / "a.safetensors").skipped) == 2


def test_trained_tokens_get_rows_for_the_most_of_them(tmp_path: Path) -> None:
    build = TINY["llama"].build
    paths = []
    for tokens in ([3], [1, 5, 7]):
        config = {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": tokens}}
        paths.append(write_adapter(tmp_path / str(len(tokens)), build(), r=2, **config))
    model = build()
    assert_fits(model, *paths)
    rows = {name: len(b) for name, b in slot_buffers(model).items() if name.endswith("token_rows")}
    assert set(rows.values()) == {3}


def test_an_adapter_of_whole_modules_alone_fits(tmp_path: Path) -> None:
    model = toy()
    file = write_file(tmp_path / "a.safetensors", {f"lora_unet_{_flat(V)}.diff": torch.ones(6, 8)})
    assert_fits(model, file)
    assert slotted(model) == {V}
    assert "lora_A" not in buffers(model)


def _flat(path: str) -> str:
    return path.replace(".", "_")


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups:UserWarning")
def test_convolutions_and_products_fit_with_the_rank_that_they_have(tmp_path: Path) -> None:
    loha = LoHaConfig(r=2, target_modules=["0"], init_weights=False)
    write_peft(tmp_path / "loha", convolutions(), loha)
    write_adapter(tmp_path / "conv", convolutions(), r=6, target_modules=["1", "2"])
    model = convolutions()
    manager = assert_fits(model, tmp_path / "loha", tmp_path / "conv")
    assert manager.status().max_rank == 6
    assert slotted(model) == {"0", "1", "2"}


def test_an_attention_that_is_never_called_fits_by_its_parameters(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.MultiheadAttention(8, 2))

    write_adapter(tmp_path, build(), r=2, target_modules=["0"])
    model = build()
    assert len(assert_fits(model, tmp_path).check(tmp_path).modules) == 2


def test_experts_fit_with_the_rank_of_one(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    def build() -> nn.Module:
        config = MixtralConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=32, num_local_experts=4,
        )  # fmt: skip
        return MixtralForCausalLM(config)

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    targets = {"target_modules": ["q_proj"], "target_parameters": names}
    write_adapter(tmp_path, build(), r=2, **targets)
    model = build()
    manager = assert_fits(model, tmp_path)
    assert manager.status().max_rank == 2
    layer = "model.layers.0"
    assert set(manager.check(tmp_path).modules) == {
        f"{layer}.self_attn.q_proj", *(f"{layer}.{name}" for name in names)
    }  # fmt: skip


def test_kohya_names_are_resolved_as_a_load_resolves_them(tmp_path: Path) -> None:
    model = toy()
    file = write_file(tmp_path / "a.safetensors", kohya(pairs({Q: 2, V: 3})))
    assert assert_fits(model, file).status().max_rank == 3
    assert slotted(model) == {Q, V}


def test_the_names_of_another_implementation_are_resolved_too(tmp_path: Path) -> None:
    file = ForeignFile(flux(), prefix="lora_unet_")
    paths = [f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v")]
    file.add("double_blocks_0_img_attn_qkv", *paths, rank=4, alpha=2.0)
    model = flux()
    manager = assert_fits(model, write_file(tmp_path / "a.safetensors", file.tensors))
    assert manager.status().max_rank == 4
    assert slotted(model) == set(paths)


def test_a_pipeline_gets_slots_in_the_components_that_its_adapters_change(tmp_path: Path) -> None:
    kind = PIPES["sdxl"]
    styles = write_styles(tmp_path, kind)
    manager = SlotManager.from_adapters(kind.build(), [styles["denoiser"]])
    assert set(manager.status().components) == {"unet"}
    manager = SlotManager.from_adapters(kind.build(), styles.values())
    assert set(manager.status().components) == {"unet", "text_encoder", "text_encoder_2"}
    assert manager.status().max_rank == 16
    assert manager.loaded_adapters == ()
    for path in styles.values():
        manager.load(path)


def test_what_is_for_other_components_is_passed_over(tmp_path: Path) -> None:
    model = toy()
    encoder = kohya(pairs({"text_model.encoder.q": 16}), prefix="lora_te_")
    file = write_file(tmp_path / "a.safetensors", kohya(pairs({Q: 2})) | encoder)
    assert assert_fits(model, file).status().max_rank == 2


def test_what_the_caller_gives_wins(tmp_path: Path) -> None:
    dora = write_dora(tmp_path, toy(), r=2, target_modules=["q_proj"])
    model = toy()
    manager = SlotManager.from_adapters(model, [dora], dora=False, bias=True, max_rank=7)
    assert manager.status().max_rank == 7
    assert "dora" not in buffers(model)
    assert "lora_bias" in buffers(model)


def test_modules_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    model = toy()
    file = write_file(tmp_path / "a.safetensors", tensors_of(pairs({Q: 2, "model.head": 2})))
    with pytest.raises(TargetMismatchError, match=r"adapts .*model\.head, which is no layer"):
        SlotManager.from_adapters(model, [file])
    assert slot_buffers(model) == {}
    manager = SlotManager.from_adapters(model, [file], target_modules=["q_proj"])
    assert manager.load(file, strict=False).modules == (Q,)


def test_a_fused_sparse_file_gets_the_rank_that_its_header_has(tmp_path: Path) -> None:
    file = ForeignFile(flux(), prefix="lora_unet_")
    name = "double_blocks_0_img_attn_qkv"
    blocks = [torch.ones(16, 2) for _ in range(3)]
    B: Tensor = torch.block_diag(*blocks)
    file.put(name, torch.ones(6, 16), B, alpha=6.0)
    path = write_file(tmp_path / "a.safetensors", file.tensors)
    manager = SlotManager.from_adapters(flux(), [path])
    assert manager.status().max_rank == 6
    assert manager.load(path).rank == 2


def test_a_grouped_convolution_gets_the_rank_of_all_its_groups(tmp_path: Path) -> None:
    write_peft(tmp_path, convolutions(), LoHaConfig(r=1, init_weights=False, target_modules=["2"]))
    assert assert_fits(convolutions(), tmp_path).status().max_rank == 2


def test_biases_of_what_another_adapter_changes_fit_beside_that(tmp_path: Path) -> None:
    biases = write_trained(tmp_path / "a", headed(), bias="all", target_modules=["q_proj"])
    dense = write_trained(tmp_path / "b", headed(), seed=1, target_modules=["dense", "out_proj"])
    model = headed()
    manager = assert_fits(model, biases, dense)
    for path in (biases, dense):
        manager.load(path)
        torch.testing.assert_close(model(X), by_peft(headed(), path), rtol=1e-5, atol=1e-5)
