"""Tiny models of diffusers, LoRA files that speak of them in other names, and what they must do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from lora_slots import LoadReport, SlotManager, read_adapter

diffusers.utils.logging.set_verbosity_error()


class ForeignFile:
    """A random LoRA file for ``model``, and the change of each of its weights that it means.

    Attributes:
        tensors: The file.
        deltas: By the path of a module of the model: what its weight must change by.
        scaling: By the same: alpha divided by the rows of the stored A.
    """

    down, up = ".lora_down.weight", ".lora_up.weight"

    def __init__(self, model: nn.Module, *, prefix: str = "", peft: bool = False) -> None:
        self.model = model
        self.prefix = prefix
        if peft:
            self.down, self.up = ".lora_A.weight", ".lora_B.weight"
        self.tensors: dict[str, Tensor] = {}
        self.deltas: dict[str, Tensor] = {}
        self.scaling: dict[str, float] = {}
        self._generator = torch.Generator().manual_seed(11)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator) / 4

    def add(
        self,
        name: str,
        *paths: str,
        rank: int = 3,
        alpha: float | None = None,
        swapped: bool = False,
    ) -> None:
        """One module of the file, which is one of the model, or several in this order.

        With ``swapped`` the file has the second half of the outputs before the first.
        """
        weights = [self.model.get_submodule(path).weight for path in paths]
        _, *inputs = weights[0].shape
        outputs = [len(weight) for weight in weights]
        A = self.random(rank, *inputs)
        B = self.random(sum(outputs), rank, *[1] * (len(inputs) - 1))
        self.put(name, A, B, alpha)
        scaling = 1.0 if alpha is None else alpha / rank
        delta = scaling * (B.flatten(1) @ A.flatten(1)).reshape(-1, *inputs)
        if swapped:
            delta = delta.roll(len(delta) // 2, 0)
        self.deltas |= dict(zip(paths, delta.split(outputs), strict=True))
        self.scaling |= dict.fromkeys(paths, scaling)

    def put(self, name: str, A: Tensor, B: Tensor, alpha: float | None = None) -> None:
        name = self.prefix + name
        self.tensors |= {name + self.down: A, name + self.up: B}
        if alpha is not None:
            self.tensors[f"{name}.alpha"] = torch.tensor(alpha)

    def expected(self, run: Callable[[nn.Module], Tensor]) -> Tensor:
        """The output of the model with its weights changed."""
        model = copy.deepcopy(self.model)
        for path, delta in self.deltas.items():
            model.get_submodule(path).weight.data += delta
        return run(model)


def assert_loads(
    file: ForeignFile, run: Callable[[nn.Module], Tensor], **settings: Any
) -> LoadReport:
    """Load the file into slots: every scaling and the output must be the file's, every bit kept."""
    before = {key: tensor.clone() for key, tensor in file.tensors.items()}
    base, expected = run(file.model), file.expected(run)
    assert not torch.allclose(base, expected, rtol=1e-4, atol=1e-4)
    model = copy.deepcopy(file.model)
    manager = SlotManager(model, max_rank=8, **settings)
    report = manager.load(read_adapter(file.tensors))
    assert report.scaling == file.scaling
    torch.testing.assert_close(run(model), expected, rtol=1e-5, atol=1e-5)
    manager.unload("default")
    assert torch.equal(run(model), base)
    assert file.tensors.keys() == before.keys()
    assert all(torch.equal(file.tensors[key], tensor) for key, tensor in before.items())
    return report


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return build().eval()


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(13))


def sdxl_unet() -> nn.Module:
    """As SDXL's: three levels with two layers each, attention on the two inner ones."""
    return seeded(
        lambda: diffusers.UNet2DConditionModel(
            sample_size=8, block_out_channels=(8, 16, 16), layers_per_block=2, norm_num_groups=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=(1, 2, 2), use_linear_projection=True, cross_attention_dim=12,
            transformer_layers_per_block=(1, 1, 2), addition_embed_type="text_time",
            addition_time_embed_dim=4, projection_class_embeddings_input_dim=4 * 6 + 8,
        )
    )  # fmt: skip


@torch.no_grad()
def run_unet(model: nn.Module) -> Tensor:
    conditions = {"text_embeds": noise(1, 8), "time_ids": torch.arange(6.0)[None]}
    return model(
        noise(1, 4, 8, 8), torch.tensor([10]), noise(1, 5, 12), added_cond_kwargs=conditions
    ).sample


def flux() -> nn.Module:
    return seeded(
        lambda: diffusers.FluxTransformer2DModel(
            in_channels=4, num_layers=2, num_single_layers=1, attention_head_dim=8,
            num_attention_heads=2, joint_attention_dim=12, pooled_projection_dim=6,
            axes_dims_rope=(4, 2, 2), guidance_embeds=True,
        )
    )  # fmt: skip


@torch.no_grad()
def run_flux(model: nn.Module) -> Tensor:
    return model(
        hidden_states=noise(1, 4, 4), encoder_hidden_states=noise(1, 3, 12),
        pooled_projections=noise(1, 6), timestep=torch.tensor([0.5]), guidance=torch.tensor([3.0]),
        img_ids=torch.arange(12.0).reshape(4, 3), txt_ids=torch.zeros(3, 3),
    ).sample  # fmt: skip


def wan() -> nn.Module:
    return seeded(
        lambda: diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
            out_channels=4, text_dim=10, freq_dim=16, ffn_dim=20, num_layers=2,
            cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
        )
    )  # fmt: skip


@torch.no_grad()
def run_wan(model: nn.Module) -> Tensor:
    return model(noise(1, 4, 1, 4, 4), torch.tensor([10]), noise(1, 5, 10)).sample


def hunyuan_video() -> nn.Module:
    return seeded(
        lambda: diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8,
            num_layers=1, num_single_layers=1, num_refiner_layers=1, patch_size=1, patch_size_t=1,
            guidance_embeds=True, text_embed_dim=10, pooled_projection_dim=6,
            rope_axes_dim=(2, 2, 4),
        )
    )  # fmt: skip


@torch.no_grad()
def run_hunyuan_video(model: nn.Module) -> Tensor:
    return model(
        noise(1, 4, 1, 3, 3), torch.tensor([10]), noise(1, 5, 10), torch.ones(1, 5),
        noise(1, 6), guidance=torch.tensor([3000.0]),
    ).sample  # fmt: skip


def qwen_image() -> nn.Module:
    return seeded(
        lambda: diffusers.QwenImageTransformer2DModel(
            patch_size=2, in_channels=8, out_channels=2, num_layers=2, attention_head_dim=8,
            num_attention_heads=2, joint_attention_dim=10, axes_dims_rope=(4, 2, 2),
        )
    )  # fmt: skip


@torch.no_grad()
def run_qwen_image(model: nn.Module) -> Tensor:
    return model(
        noise(1, 4, 8), noise(1, 3, 10), torch.ones(1, 3), torch.tensor([0.5]),
        img_shapes=[[(1, 2, 2)]],
    ).sample  # fmt: skip
