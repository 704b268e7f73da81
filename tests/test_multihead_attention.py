"""`nn.MultiheadAttention` reads its weights and calls no layer; adapters act on what it reads."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file
from torch import Tensor, nn
from toys import WEIGHTS, CountingBackend, Snapshot, pairs, peft_model, tensors_of, write_adapter

from lora_slots import (
    AdapterFileError,
    RankTooLargeError,
    SlotManager,
    TargetMismatchError,
    UnsupportedAdapterError,
    read_adapter,
)


class Attending(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(8, 2, **options)
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor, need_weights: bool = True) -> Tensor:
        y, weights = self.self_attn(x, x, x, need_weights=need_weights)
        y = self.head(y)
        return y if weights is None else y + weights.sum() / weights.numel() + weights.std()


def attending(**options) -> Attending:
    torch.manual_seed(0)
    return Attending(**{"batch_first": True, **options}).eval()


X = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(7))
BOTH = ("self_attn.in_proj_weight", "self_attn.out_proj.weight")


@pytest.fixture
def path(tmp_path):
    return write_adapter(tmp_path / "a", attending(), r=2, target_modules=["self_attn", "head"])


def by_peft(path, x=X, model=None, **kwargs):
    with torch.no_grad():
        return peft_model(model or attending(), path)(x, **kwargs)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_output_is_that_of_peft(batch_first, need_weights, bias, mode, path):
    options = {"batch_first": batch_first, "bias": bias}
    model, plain = attending(**options), attending(**options)
    expected = by_peft(path, model=attending(**options), need_weights=need_weights)
    manager = SlotManager(model, max_rank=4, target_modules=["self_attn", "head"])
    with mode():
        base = model(X, need_weights)
        assert torch.equal(base, plain(X, need_weights))
        manager.load(path)
        torch.testing.assert_close(model(X, need_weights), expected, rtol=1e-5, atol=1e-5)
        manager.set_weight("default", 0.0)
        assert torch.equal(model(X, need_weights), base)
        manager.unload("default")
        assert torch.equal(model(X, need_weights), base)
        manager.detach()
        assert torch.equal(model(X, need_weights), base)
    assert type(model.self_attn) is nn.MultiheadAttention


@torch.no_grad()
def test_patterns_of_the_config_speak_of_the_attention_as_a_whole(tmp_path):
    path = write_adapter(
        tmp_path / "a", attending(), r=2, target_modules=["self_attn"],
        rank_pattern={"self_attn": 3}, alpha_pattern={"self_attn": 6},
    )  # fmt: skip
    model = attending()
    report = SlotManager(model, max_rank=4, target_modules=["self_attn"]).load(path)
    assert report.modules == BOTH
    assert report.scaling == dict.fromkeys(BOTH, 2.0)
    assert report.rank == 3
    torch.testing.assert_close(model(X), by_peft(path), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_peft_adds_the_output_projection_twice_and_so_do_we(path):
    tensors = load_file(path / WEIGHTS)
    start = "base_model.model.self_attn.base_layer.out_proj."
    update = 4 * tensors[f"{start}lora_B.weight"] @ tensors[f"{start}lora_A.weight"]
    model = attending()
    SlotManager(model, max_rank=4, target_modules=["self_attn", "head"]).load(path)
    expected = attending().self_attn.out_proj.weight + 2 * update
    torch.testing.assert_close(model.self_attn.out_proj.weight, expected)


@torch.no_grad()
def test_all_linear_means_the_output_projection_which_peft_would_not_read():
    model = attending()
    base = model(X)
    manager = SlotManager(model, max_rank=4)
    assert [target.path for target in manager._layout] == ["self_attn.out_proj.weight", "head"]
    A, B = pairs({"self_attn.out_proj": 4}, outputs=8)["self_attn.out_proj"]
    manager.load(read_adapter(tensors_of({"self_attn.out_proj": (A, B)})))
    expected = attending()
    expected.self_attn.out_proj.weight += B @ A
    torch.testing.assert_close(model(X), expected(X), rtol=1e-5, atol=1e-5)
    manager.unload("default")
    assert torch.equal(model(X), base)


@pytest.mark.parametrize(
    ("targets", "paths"),
    [
        (["self_attn"], BOTH),
        (["out_proj"], BOTH[1:]),
        (["in_proj_weight"], BOTH[:1]),
        (["self_attn.out_proj.weight"], BOTH[1:]),
        ("self_attn", BOTH),
        (r".*(out_proj|head)", (BOTH[1], "head")),
    ],
)
def test_target_modules_name_the_attention_or_one_projection(targets, paths):
    manager = SlotManager(attending(), max_rank=4, target_modules=targets)
    assert tuple(target.path for target in manager._layout) == paths


def test_an_adapter_for_more_than_was_chosen_is_refused_or_left_out(path):
    model = attending()
    manager = SlotManager(model, max_rank=4, target_modules=["out_proj", "head"])
    before = Snapshot.of(manager, model)
    match = r"self_attn\.in_proj_weight: is a parameter that is not among the target modules"
    with pytest.raises(TargetMismatchError, match=match):
        manager.load(path)
    before.assert_unchanged(manager, model)
    report = manager.load(path, strict=False)
    assert report.modules == (BOTH[1], "head")
    assert [key for key, _ in report.skipped] == ["base_model.model.self_attn.in_proj_weight"]


def test_from_adapters_chooses_both_projections(path):
    manager = SlotManager.from_adapters(attending(), [path])
    assert tuple(target.path for target in manager._layout) == (*BOTH, "head")
    assert manager.load(path).rank == 2


def test_separate_projections_are_refused_by_name():
    model = attending(kdim=4, vdim=4)
    match = r"target module self_attn has separate projections, since its kdim or vdim"
    with pytest.raises(TargetMismatchError, match=match):
        SlotManager(model, max_rank=4, target_modules=["self_attn"])
    manager = SlotManager(model, max_rank=4)
    raw = read_adapter(tensors_of(pairs({"self_attn": 2}, outputs=24) | pairs({"head": 2})))
    with pytest.raises(UnsupportedAdapterError, match=r"MultiheadAttention layers .* no slots"):
        manager.load(raw)


@torch.no_grad()
def test_failed_loads_change_nothing(path):
    model = attending()
    manager = SlotManager(model, max_rank=4, target_modules=["self_attn", "head"])
    manager.load(path)
    before = Snapshot.of(manager, model)
    tensors = load_file(path / WEIGHTS)
    bad = tensors["base_model.model.self_attn.lora_A.weight"].clone()
    bad[1, 2] = torch.nan
    nan = {**tensors, "base_model.model.self_attn.lora_A.weight": bad}
    large = tensors_of(pairs({"self_attn": 5}, outputs=24))
    other = tensors_of(pairs({"self_attn": 2}, outputs=20))
    dora = {**tensors, "base_model.model.self_attn.lora_magnitude_vector": torch.ones(24)}
    for source, error, match in (
        (nan, AdapterFileError, r"lora_A of self_attn\.in_proj_weight .* has 1 NaN"),
        (large, RankTooLargeError, r"has rank 5 at self_attn\.in_proj_weight, but max_rank is 4"),
        (other, TargetMismatchError, r"in_features=8 and out_features=24"),
        (dora, UnsupportedAdapterError, r"uses DoRA on .*self_attn\.in_proj_weight, a parameter"),
    ):
        with pytest.raises(error, match=match):
            manager.load(read_adapter(source))
        before.assert_unchanged(manager, model)


@torch.no_grad()
def test_swaps_in_any_order_are_one_graph(path, tmp_path):
    torch._dynamo.reset()
    others = [
        path,
        write_adapter(tmp_path / "b", attending(), seed=1, r=4, target_modules=["self_attn"]),
        write_adapter(tmp_path / "c", attending(), seed=2, r=1, target_modules=["head"]),
    ]
    model = attending()
    manager = SlotManager(model, max_rank=4, target_modules=["self_attn", "head"])
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    base = compiled(X)
    assert torch.equal(base, attending()(X))
    with manager.no_recompile():
        for index in (0, 1, 2, 1, 0):
            manager.load(others[index])
            expected = by_peft(others[index])
            torch.testing.assert_close(compiled(X), expected, rtol=1e-5, atol=1e-5)
        manager.unload("default")
        assert torch.equal(compiled(X), base)
    assert backend.graphs == 1
    compiled(X.double().float(), need_weights=False)  # the twin: another argument compiles again
    assert backend.graphs == 2
    torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_bring_their_own_slots(path, duplicate):
    model = attending()
    base = model(X)
    SlotManager(model, max_rank=4, target_modules=["self_attn", "head"]).load(path)
    active = model(X)
    other = duplicate(model)
    assert torch.equal(other(X), active)
    SlotManager.of(other).unload("default")
    assert torch.equal(other(X), base)
    assert torch.equal(model(X), active)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_nothing_loaded_is_the_base(path, dtype):
    model = attending().to(dtype)
    x = X.to(dtype)
    base = model(x)
    manager = SlotManager(model, max_rank=4, target_modules=["self_attn", "head"])
    assert torch.equal(model(x), base)
    manager.load(path)
    own = attending().self_attn.in_proj_weight
    tensors = load_file(path / WEIGHTS)
    A, B = (tensors[f"base_model.model.self_attn.lora_{side}.weight"] for side in "AB")
    expected = (own + 4 * B @ A).to(dtype)
    torch.testing.assert_close(model.self_attn.in_proj_weight, expected, rtol=2e-2, atol=2e-2)
    manager.unload("default")
    assert torch.equal(model(x), base)


@torch.no_grad()
def test_both_biases_are_held_where_slots_have_room_for_a_bias(tmp_path):
    path = write_adapter(tmp_path / "a", attending(), r=2, target_modules=["self_attn"], bias="all")
    tensors = load_file(path / WEIGHTS)
    name = "base_model.model.self_attn.base_layer.out_proj.base_layer.bias"
    tensors[name] = torch.arange(8.0)
    raw = read_adapter(tensors, {"r": 2, "lora_alpha": 8, "bias": "all"})
    with pytest.raises(UnsupportedAdapterError, match="build the SlotManager with bias=True"):
        SlotManager(attending(), max_rank=4, target_modules=["self_attn"]).load(raw)
    model = attending()
    SlotManager(model, max_rank=4, target_modules=["self_attn"], bias=True).load(raw)
    assert torch.equal(model.self_attn.out_proj.bias, torch.arange(8.0))
    expected = peft_model(attending(), path)
    expected.base_model.model.self_attn.base_layer.out_proj.base_layer.bias.copy_(torch.arange(8.0))
    torch.testing.assert_close(model(X), expected(X), rtol=1e-5, atol=1e-5)
