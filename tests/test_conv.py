"""Convolutions that PEFT cannot do, or other trainers write: held against the merged weight."""

from __future__ import annotations

import re

import pytest
import torch
from conv_nets import DIMS, One, net, one, pair, random, refused_by_one, with_delta
from torch import Tensor, nn

from lora_slots import SlotManager, TargetMismatchError, read_adapter

SETTINGS = {
    "dilation": (2, {"dilation": 2}),
    "dilation, another on each axis": (2, {"dilation": (1, 3), "padding": (2, 0)}),
    "dilation and stride, 1d": (1, {"dilation": 2, "stride": 2, "padding": 1}),
    "dilation, same": (3, {"dilation": 2, "padding": "same"}),
    "circular": (2, {"padding": 1, "padding_mode": "circular"}),
    "reflect": (2, {"padding": (2, 1), "padding_mode": "reflect"}),
    "replicate, 3d": (3, {"padding": 1, "padding_mode": "replicate"}),
    "reflect, same, 1d": (1, {"padding": "same", "padding_mode": "reflect", "dilation": 2}),
}


@pytest.mark.parametrize(("dims", "options"), SETTINGS.values(), ids=SETTINGS.keys())
@torch.no_grad()
def test_an_adapter_is_a_change_of_the_weight_whatever_the_layer_does(dims: int, options):
    model = one(DIMS[dims], 4, 5, 3, **options)
    A, B = random(2, 4, *[3] * dims), random(5, 2, *[1] * dims, seed=1)
    expected = with_delta(model, 0.5 * B.flatten(1) @ A.flatten(1))
    x = random(2, 4, *[7] * dims)
    base = model(x)
    manager = SlotManager(model, max_rank=4, target_modules=["layer"])
    assert torch.equal(model(x), base)
    manager.load(pair(A, B, alpha=1.0))
    torch.testing.assert_close(model(x), expected(x), rtol=1e-5, atol=1e-5)
    # What the base layer is told later holds for its slots, too.
    model.layer.padding = expected.layer.padding = tuple(range(dims))
    torch.testing.assert_close(model(x), expected(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dims", [1, 2, 3])
@torch.no_grad()
def test_an_input_without_a_batch_is_one_item_of_it(dims: int):
    model = one(DIMS[dims], 4, 5, 3, padding=1)
    manager = SlotManager(model, max_rank=4, target_modules=["layer"], dora=True, bias=True)
    x = random(1, 4, *[6] * dims)
    assert model(x[0]).shape == (5, *[6] * dims)
    manager.load(pair(random(2, 4, *[3] * dims), random(5, 2, *[1] * dims)))
    torch.testing.assert_close(model(x[0]), model(x)[0])


@torch.no_grad()
def test_the_memory_format_is_the_base_layers():
    base, model = (one(nn.Conv2d, 4, 8, 3, padding=1) for _ in range(2))
    manager = SlotManager(model, max_rank=4, target_modules=["layer"], dora=True, bias=True)
    x = random(2, 4, 6, 6)
    outputs = []
    for adapter in (None, pair(random(2, 4, 3, 3), random(8, 2, 1, 1))):
        if adapter is not None:
            manager.load(adapter)
        for memory_format in (torch.contiguous_format, torch.channels_last):
            y = model(x.contiguous(memory_format=memory_format))
            assert y.is_contiguous(memory_format=memory_format)
            outputs.append(y)
            if adapter is None:
                assert torch.equal(y, base(x.contiguous(memory_format=memory_format)))
    torch.testing.assert_close(outputs[2], outputs[3], rtol=1e-5, atol=1e-5)


def locon(case: str) -> tuple[One, Tensor, tuple[Tensor, Tensor], Tensor]:
    """A layer, an input, a down and up pair, and the change of the weight at scaling 1."""
    if case == "a: 3x3, stride 2":
        model, x = one(nn.Conv2d, 7, 5, 3, stride=2, padding=1), random(2, 7, 8, 8)
        down, up = random(2, 7, 3, 3), random(5, 2, 1, 1, seed=1)
    elif case == "b: Linear, 1x1 file":
        model, x = one(nn.Linear, 8, 6), random(3, 8)
        down, up = random(4, 8, 1, 1), random(6, 4, 1, 1, seed=1)
    else:
        model, x = one(nn.Conv2d, 8, 6, 1), random(2, 8, 5, 5)
        down, up = random(4, 8), random(6, 4, seed=1)
    return model, x, (down, up), up.flatten(1) @ down.flatten(1)


@pytest.mark.parametrize(
    "case", ["a: 3x3, stride 2", "b: Linear, 1x1 file", "c: 1x1 conv, Linear file"]
)
@torch.no_grad()
def test_a_projection_may_be_a_1x1_convolution_or_a_linear_layer(case: str):
    model, x, (down, up), delta = locon(case)
    scaling = 2.0 / len(down)
    expected = with_delta(model, scaling * delta)
    report = SlotManager(model, max_rank=4, target_modules=["layer"]).load(pair(down, up, 2.0))
    assert report.scaling == {"layer": scaling}
    torch.testing.assert_close(model(x), expected(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [2, 4], ids=["two groups", "depthwise"])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1)], ids=["3x3", "1x1"])
@torch.no_grad()
def test_the_lora_A_of_one_group_is_that_of_each_group(groups: int, kernel: tuple[int, int]):
    # As LyCORIS and kohya multiply them: (up @ down) has the shape of the weight.
    model = one(nn.Conv2d, 4, 8, kernel, groups=groups)
    down, up = random(3, 4 // groups, *kernel), random(8, 3, 1, 1, seed=1)
    expected = with_delta(model, 2.0 * up.flatten(1) @ down.flatten(1))
    manager = SlotManager(model, max_rank=3 * groups, target_modules=["layer"])
    report = manager.load(pair(down, up, alpha=6.0))
    assert report.scaling == {"layer": 2.0}
    assert report.rank == 3 * groups
    x = random(2, 4, 6, 6)
    torch.testing.assert_close(model(x), expected(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_lora_A_over_all_channels_crosses_the_groups():
    # As kohya's trainer applies it: the groups are those of the base layer alone.
    model = one(nn.Conv2d, 4, 8, 3, groups=2)
    down, up = random(3, 4, 3, 3), random(8, 3, 1, 1, seed=1)
    x = random(2, 4, 6, 6)
    expected = model(x) + nn.functional.conv2d(nn.functional.conv2d(x, down), up)
    SlotManager(model, max_rank=3, target_modules=["layer"]).load(pair(down, up))
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids="file in {}".format
)
@torch.no_grad()
def test_tucker_factors_are_folded_exactly(dtype: torch.dtype):
    model = one(nn.Conv2d, 7, 5, 3, stride=2, padding=1)
    down, mid = random(2, 7, 1, 1).to(dtype), random(3, 2, 3, 3, seed=1).to(dtype)
    up = random(5, 3, 1, 1, seed=2).to(dtype)
    delta = torch.einsum("or,rmkl,mi->oikl", *(t.float() for t in (up[..., 0, 0], mid)),
                         down[..., 0, 0].float())  # fmt: skip
    # alpha 2 over two rows of down.
    expected = with_delta(model, 1.0 * delta)
    manager = SlotManager(model, max_rank=3, target_modules=["layer"])
    report = manager.load(pair(down, up, alpha=2.0, lora_mid=mid))
    assert (report.rank, report.scaling) == (3, {"layer": 1.0})
    x = random(2, 7, 8, 8)
    torch.testing.assert_close(model(x), expected(x), rtol=1e-5, atol=1e-5)


REFUSED = {
    "a 3x3 down on a Linear": (
        lambda: one(nn.Linear, 8, 6), (4, 8, 3, 3), (6, 4, 1, 1), {},
        r"layer has in_features=8 .* lora_A must be \(4, 8\) .* has \(4, 8, 3, 3\)",
    ),
    "another kernel": (
        lambda: one(nn.Conv2d, 7, 5, 3), (2, 7, 1, 1), (5, 2, 1, 1), {},
        r"lora_A must be \(2, 7, 3, 3\) .* has \(2, 7, 1, 1\)",
    ),
    "a kernel turned round": (
        lambda: one(nn.Conv2d, 7, 5, (3, 1)), (2, 7, 1, 3), (5, 2, 1, 1), {},
        r"lora_A must be \(2, 7, 3, 1\) .* has \(2, 7, 1, 3\)",
    ),
    "other channels": (
        lambda: one(nn.Conv1d, 7, 5, 3), (2, 6, 3), (5, 2, 1), {}, r"lora_A must be \(2, 7, 3\)"
    ),
    "a kernel in lora_B": (
        lambda: one(nn.Conv2d, 7, 5, 3), (2, 7, 3, 3), (5, 2, 3, 3), {}, r"lora_B \(5, 2\)"
    ),
    "groups that the layer has not": (
        lambda: one(nn.Conv2d, 6, 8, 3), (4, 6, 3, 3), (8, 2, 1, 1), {}, r"lora_B \(8, 4\)"
    ),
    "ranks that differ": (
        lambda: one(nn.Conv2d, 6, 8, 3), (4, 6, 3, 3), (8, 3, 1, 1), {},
        r"must have the same rank, at least 1, got 4 .* and 3",
    ),
    "a core that does not fit": (
        lambda: one(nn.Conv2d, 7, 5, 3), (2, 7, 1, 1), (5, 3, 1, 1), {"lora_mid": (3, 4, 3, 3)},
        r"lora_mid of layer .* must be floats \[r, 2, \*kernel\]",
    ),
    "a core after a kernel": (
        lambda: one(nn.Conv2d, 7, 5, 3), (2, 7, 3, 3), (5, 3, 1, 1), {"lora_mid": (3, 2, 3, 3)},
        r"beside a lora_A of \[2, in\]",
    ),
    "too large a rank by its groups": (
        lambda: one(nn.Conv2d, 8, 8, 3, groups=4), (3, 2, 3, 3), (8, 3, 1, 1), {},
        r"has rank 12 at layer, but max_rank is 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "down", "up", "more", "message"), REFUSED.values(), ids=REFUSED.keys()
)
def test_what_does_not_fit_a_layer_is_refused_and_changes_nothing(model, down, up, more, message):
    more = {name: random(*shape) for name, shape in more.items()}
    text = refused_by_one(model(), pair(random(*down), random(*up), **more))
    assert re.search(message, text), text


def test_dora_on_a_grouped_convolution_is_refused_by_name():
    tensors = {
        "layer.lora_A.weight": random(2, 6, 3, 3),
        "layer.lora_B.weight": random(8, 1, 1, 1),
        "layer.lora_magnitude_vector": random(1, 8, 1, 1),
    }
    config = {"r": 2, "lora_alpha": 2, "use_dora": True}
    text = refused_by_one(
        one(nn.Conv2d, 6, 8, 3, groups=2), read_adapter(tensors, config), dora=True
    )
    assert "has DoRA at layer" in text
    assert "groups=2" in text


class SamePad(nn.Conv2d):
    """A convolution that changes its input first, as timm's and Wan's do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))


@pytest.mark.parametrize(
    "layer",
    [nn.ConvTranspose1d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3), SamePad(4, 4, 3)],
    ids=lambda layer: type(layer).__name__,
)
def test_convolutions_of_another_kind_are_refused_by_name(layer: nn.Module):
    message = (
        rf"target module layer is {type(layer).__name__}; only Linear, Conv1D, Conv1d, Conv2d, "
        "Conv3d and Embedding layers take adapters"
    )
    with pytest.raises(TargetMismatchError, match=message):
        SlotManager(One(layer), max_rank=2, target_modules=["layer"])


def test_all_linear_means_no_convolution_and_no_embedding():
    manager = SlotManager(net(), max_rank=2)
    assert [target.path for target in manager._layout] == [
        "first.time_emb_proj",
        "second.time_emb_proj",
    ]
