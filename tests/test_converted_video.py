"""Files for Wan, HunyuanVideo and Qwen-Image under the names of their authors and trainers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from adapter_files import write_file
from diffusers import HunyuanVideoTransformer3DModel
from diffusers.loaders import WanLoraLoaderMixin
from foreign_files import (
    ForeignFile,
    assert_loads,
    hunyuan_video,
    qwen_image,
    run_hunyuan_video,
    run_qwen_image,
    run_wan,
    wan,
)
from torch import nn

from lora_slots import SlotManager, TargetMismatchError, UnsupportedAdapterError, read_adapter
from lora_slots.attach.survey import survey
from lora_slots.resolve.fused import convert
from lora_slots.resolve.pairing import pair_up

IN_WAN_BLOCK = {
    f"{theirs}.{layer}": f"{ours}.{own}"
    for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
    for layer, own in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
} | {"ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2"}
AROUND_WAN = {
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
}


def wan_file(*, flat: bool = False, **options: object) -> ForeignFile:
    file = ForeignFile(wan(), **options)
    for block in range(2):
        for number, (name, path) in enumerate(IN_WAN_BLOCK.items()):
            name = f"blocks.{block}.{name}"
            name = name.replace(".", "_") if flat else name
            file.add(name, f"blocks.{block}.{path}", rank=2, alpha=1.0 + number)
    return file


@pytest.mark.parametrize("peft", [True, False], ids=["lora_A", "lora_down"])
@pytest.mark.parametrize("prefix", ["diffusion_model.", "model.diffusion_model.", ""])
def test_wan_under_its_authors_names(prefix: str, peft: bool) -> None:
    file = wan_file(prefix=prefix, peft=peft)
    # diffusers refuses alphas on these.
    for name, path in AROUND_WAN.items():
        file.add(name, path, rank=4, alpha=6.0)
    assert len(assert_loads(file, run_wan).modules) == 26


def test_wan_by_musubi() -> None:
    assert_loads(wan_file(flat=True, prefix="lora_unet_"), run_wan)


def test_wan_without_any_alpha_has_scaling_1() -> None:
    file = ForeignFile(wan(), prefix="diffusion_model.")
    file.add("blocks.1.cross_attn.q", "blocks.1.attn2.to_q", rank=5)
    assert assert_loads(file, run_wan).scaling == {"blocks.1.attn2.to_q": 1.0}


def test_a_block_of_wan_without_some_of_its_layers_loads() -> None:
    file = ForeignFile(wan(), prefix="diffusion_model.", peft=True)
    for block in (1,):
        file.add(f"blocks.{block}.self_attn.o", f"blocks.{block}.attn1.to_out.0", alpha=5.0)
    assert_loads(file, run_wan)


@pytest.mark.parametrize("peft", [True, False], ids=["lora_A", "lora_down"])
@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "transformer."])
def test_hunyuan_video_under_its_authors_names(prefix: str, peft: bool) -> None:
    file = ForeignFile(hunyuan_video(), prefix=prefix, peft=peft)
    block, alphas = "transformer_blocks.0", iter([None, 1.0, 6.0, -2.0] * 5)
    for stream, (q, k, v), out, norm, ff in (
        ("img", ("to_q", "to_k", "to_v"), "to_out.0", "norm1", "ff"),
        ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "norm1_context",
         "ff_context"),
    ):  # fmt: skip
        name = f"double_blocks.0.{stream}"
        fused = (f"{block}.attn.{path}" for path in (q, k, v))
        file.add(f"{name}_attn_qkv", *fused, alpha=next(alphas))
        file.add(f"{name}_attn_proj", f"{block}.attn.{out}", alpha=next(alphas))
        file.add(f"{name}_mod.linear", f"{block}.{norm}.linear", alpha=next(alphas))
        file.add(f"{name}_mlp.fc1", f"{block}.{ff}.net.0.proj", alpha=next(alphas))
        file.add(f"{name}_mlp.fc2", f"{block}.{ff}.net.2", alpha=next(alphas))
    own = "single_transformer_blocks.0"
    file.add("single_blocks.0.linear2", f"{own}.proj_out", alpha=2.0)
    file.add("single_blocks.0.modulation.linear", f"{own}.norm.linear", alpha=2.0)
    # diffusers would cut lora_A of this one into thirds as well.
    own = "context_embedder.token_refiner.refiner_blocks.0.attn"
    name = "txt_in.individual_token_refiner.blocks.0.self_attn_qkv"
    file.add(name, *(f"{own}.to_{layer}" for layer in "qkv"), alpha=4.0)
    file.add("final_layer.adaLN_modulation.1", "norm_out.linear", swapped=True, alpha=2.0)
    assert_loads(file, run_hunyuan_video)


def test_the_fused_layer_of_hunyuan_video_is_cut_at_its_real_width() -> None:
    with torch.device("meta"):
        model = HunyuanVideoTransformer3DModel(num_layers=0, num_single_layers=1)
    A, B = torch.randn(2, 3072), torch.randn(3 * 3072 + 12288, 2)
    name = "single_blocks.0.linear1"
    raw = read_adapter({f"{name}.lora_A.weight": A, f"{name}.lora_B.weight": B})
    parts = convert(pair_up(raw)[0], survey(model), raw)[name]
    ends = [part.module.removeprefix("single_transformer_blocks.0.") for part in parts]
    assert ends == ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"]
    assert torch.equal(torch.cat([part.lora_B for part in parts]), B)


def test_qwen_image_in_any_spelling() -> None:
    """Its names are those of diffusers; kohya's are told apart by the model's own."""
    for flat in (True, False):
        file = ForeignFile(qwen_image(), prefix="lora_unet_" if flat else "diffusion_model.")
        for path, module in file.model.named_modules():
            if isinstance(module, nn.Linear) and ".attn." in path:
                file.add(path.replace(".", "_") if flat else path, path, rank=2, alpha=3.0)
        assert_loads(file, run_qwen_image)


def test_a_module_that_is_no_target_is_named_as_the_models_own() -> None:
    file = wan_file(prefix="diffusion_model.")
    manager = SlotManager(file.model, max_rank=8, target_modules=["to_q", "to_k", "to_v"])
    raw = read_adapter(file.tensors)
    with pytest.raises(TargetMismatchError, match=r"blocks\.0\.attn1\.to_out\.0: is Linear, not"):
        manager.load(raw)
    report = manager.load(raw, strict=False)
    assert len(report.modules) == 12
    assert ("blocks.0.ffn.net.2", "is Linear, not one of the target modules") in report.skipped


@torch.no_grad()
def test_biases_and_norms_that_are_added_are_found_by_the_same_names() -> None:
    """As the files that speed up Wan have them."""
    file = ForeignFile(wan(), prefix="diffusion_model.")
    path, plain = "blocks.1.attn1.to_q", "condition_embedder.time_proj"
    file.add("blocks.1.self_attn.q", path, alpha=6.0)
    biases = {path: file.random(24), plain: file.random(144)}
    added = {
        "diffusion_model.blocks.1.self_attn.q.diff_b": biases[path],
        "diffusion_model.time_projection.1.diff_b": biases[plain],
    }
    expected = copy.deepcopy(file.model)
    for name, bias in biases.items():
        expected.get_submodule(name).bias += bias
    expected.get_submodule(path).weight += file.deltas[path]
    model = copy.deepcopy(file.model)
    SlotManager(model, max_rank=8, bias=True).load(read_adapter(file.tensors | added))
    torch.testing.assert_close(run_wan(model), run_wan(expected), rtol=1e-5, atol=1e-5)
    manager = SlotManager(file.model, max_rank=8)
    with pytest.raises(UnsupportedAdapterError, match=r"2 diff_b .*bias=True"):
        manager.load(read_adapter(file.tensors | added))


def test_diffusers_agrees_on_musubis() -> None:
    file = wan_file(flat=True, prefix="lora_unet_")
    model = copy.deepcopy(file.model)
    tensors = WanLoraLoaderMixin.lora_state_dict(dict(file.tensors))
    model.load_lora_adapter(tensors, prefix="transformer")
    torch.testing.assert_close(run_wan(model), file.expected(run_wan), rtol=1e-4, atol=1e-5)


def test_a_manager_can_be_built_from_such_files(tmp_path: Path) -> None:
    file = ForeignFile(hunyuan_video(), prefix="transformer.")
    paths = [f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v")]
    file.add("double_blocks.0.img_attn_qkv", *paths, rank=5, alpha=10.0)
    added = {"transformer.double_blocks.0.img_attn_qkv.diff_b": file.random(48)}
    path = write_file(tmp_path / "a.safetensors", file.tensors | added)
    report = SlotManager.from_adapters(file.model, [path]).load(path)
    assert report.scaling == file.scaling
    assert report.rank == 5
    for name, bias in zip(paths, added.popitem()[1].split(16), strict=True):
        assert torch.equal(file.model.get_submodule(name).lora_slots.lora_bias[0], bias)
