"""Single convolutions, a small residual network of them, and adapters for both."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from toys import Snapshot

from lora_slots import LoraSlotsError, RawAdapter, SlotManager, read_adapter

DIMS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class One(nn.Module):
    """A model of one layer, ``layer``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def one(layer: type[nn.Module], *sizes: Any, **options: Any) -> One:
    torch.manual_seed(0)
    return One(layer(*sizes, **options)).eval()


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, inputs), nn.GroupNorm(2, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time_emb_proj = nn.Linear(time, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(nn.functional.silu(self.norm1(x)))
        h = h + self.time_emb_proj(nn.functional.silu(time))[:, :, None, None]
        h = self.conv2(nn.functional.silu(self.norm2(h)))
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Net(nn.Module):
    """Residual blocks, a strided and a depthwise convolution, and an embedding of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(10, 8)
        self.conv_in = nn.Conv2d(4, 8, 3, padding=1)
        self.first = ResBlock(8, 12, 8)
        self.down = nn.Conv2d(12, 12, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.second = ResBlock(12, 12, 8)
        self.conv_out = nn.Conv2d(12, 4, 3, padding=1)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        time = self.time(steps)
        x = self.depthwise(self.down(self.first(self.conv_in(x), time)))
        return self.conv_out(self.second(x, time))


NET_TARGETS = [
    "time", "conv_in", "conv1", "conv2", "conv_shortcut", "time_emb_proj", "down", "conv_out",
]  # fmt: skip
NET_INPUTS = random(2, 4, 8, 8, seed=5), torch.tensor([3, 7])


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def net_adapter(rank: int = 2, *, alpha: float = 4, seed: int = 0) -> RawAdapter:
    """A random adapter for all of `NET_TARGETS`, under PEFT's names."""
    tensors = {}
    for number, (path, layer) in enumerate(net().named_modules()):
        if path.split(".")[-1] not in NET_TARGETS:
            continue
        if isinstance(layer, nn.Embedding):
            A, B = (rank, layer.num_embeddings), (layer.embedding_dim, rank)
            names = "lora_embedding_A", "lora_embedding_B"
        elif isinstance(layer, nn.Conv2d):
            A = (rank, layer.in_channels, *layer.kernel_size)
            B = (layer.out_channels, rank, 1, 1)
            names = "lora_A.weight", "lora_B.weight"
        else:
            A, B = (rank, layer.in_features), (layer.out_features, rank)
            names = "lora_A.weight", "lora_B.weight"
        for name, shape, extra in zip(names, (A, B), (0, 1), strict=True):
            where = 100 * seed + 2 * number + extra
            tensors[f"base_model.model.{path}.{name}"] = random(*shape, seed=where, scale=0.3)
    return read_adapter(tensors, {"r": rank, "lora_alpha": alpha})


def with_delta(model: One, delta: Tensor) -> One:
    """A copy of ``model`` whose layer has ``delta`` added to its weight, as it would be merged."""
    merged = copy.deepcopy(model)
    with torch.no_grad():
        merged.layer.weight += delta.view_as(merged.layer.weight)
    return merged


def pair(A: Tensor, B: Tensor, alpha: float | None = None, **more: Tensor) -> RawAdapter:
    """An adapter without a config for ``layer``, as kohya scripts name its parts."""
    tensors = {"layer.lora_down.weight": A, "layer.lora_up.weight": B}
    tensors |= {f"layer.{name}.weight": tensor for name, tensor in more.items()}
    if alpha is not None:
        tensors["layer.alpha"] = torch.tensor(alpha)
    return read_adapter(tensors)


def refused_by_one(model: One, source: RawAdapter | Path, **options: Any) -> str:
    """Load ``source`` over a live adapter of rank 1 of ``layer``: it must change nothing.

    Returns the error's text.
    """
    manager = SlotManager(model, target_modules=["layer"], **{"max_rank": 8, **options})
    target = manager._layout.targets[0]
    live = random(1, *target.in_shape, seed=8), random(target.out_features, 1, seed=9)
    manager.load(pair(*live))
    before = Snapshot.of(manager, model)
    for attempt in (manager.check, manager.load):
        try:
            attempt(source)
        except LoraSlotsError as error:
            before.assert_unchanged(manager, model)
            text = str(error)
        else:
            raise AssertionError("not refused")
    return text
