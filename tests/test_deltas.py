"""``.diff``, ``.diff_b``, ``.w_norm``, ``.b_norm``: added to the base, times the weight alone."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from safetensors.torch import save_file
from toys import CountingBackend, Snapshot
from whole_files import Headed, X, headed, manager_of, with_pair

from lora_slots import SlotManager, UnsupportedAdapterError, read_adapter


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


DIFFS = {
    "q_proj.diff_b": random(8, seed=1),
    "norm.w_norm": random(8, seed=2),
    "norm.b_norm": random(8, seed=3),
    "classifier.dense.diff": random(8, 8, seed=4),
    "classifier.dense.diff_b": random(8, seed=5),
    "classifier.out_proj.diff": random(5, 8, seed=6),
}
FULL = ["norm", "classifier"]
ALPHA = {"q_proj.alpha": torch.tensor(6.0)}


def changed(weight: float, diffs=DIFFS, pair=True) -> Headed:
    """The base with the differences added, and the low-rank update of `with_pair`."""
    model = headed()
    names = {"diff": "weight", "diff_b": "bias", "w_norm": "weight", "b_norm": "bias"}
    with torch.no_grad():
        for key, tensor in diffs.items():
            module, _, part = key.rpartition(".")
            getattr(model.get_submodule(module), names[part]).add_(weight * tensor)
        if pair:
            A, B = (with_pair({}).tensors[f"q_proj.lora_{side}.weight"] for side in "AB")
            model.q_proj.weight += weight * 3 * B @ A
    return model


@torch.no_grad()
@pytest.mark.parametrize("weight", [1.0, 0.5, -2.0])
def test_every_difference_is_added_times_the_weight_alone(weight):
    model = headed()
    base = model(X)
    manager = manager_of(model, full_modules=FULL, bias=True)
    report = manager.load(with_pair({**DIFFS, **ALPHA}), weight=weight)
    assert report.skipped == ()
    assert report.scaling == {"q_proj": 3.0}
    torch.testing.assert_close(model(X), changed(weight)(X), rtol=1e-5, atol=1e-5)
    manager.set_weight("default", 0.0)
    assert torch.equal(model(X), base)


@torch.no_grad()
def test_a_difference_may_come_without_a_low_rank_update():
    model = headed()
    base = model(X)
    manager = manager_of(model, full_modules=FULL, bias=True)
    report = manager.load(read_adapter(DIFFS))
    assert report.rank == 0
    assert report.scaling == {}
    torch.testing.assert_close(model(X), changed(1.0, pair=False)(X), rtol=1e-5, atol=1e-5)
    # A layer without a bias of its own takes one as well.
    manager.load(read_adapter({"k_proj.diff_b": torch.ones(8)}))
    expected = headed().k_proj(X) + 1
    torch.testing.assert_close(model.k_proj(X), expected)
    manager.unload("default")
    assert torch.equal(model(X), base)


@torch.no_grad()
def test_kohyas_names_are_found_through_the_models_own(tmp_path):
    flat = {
        f"lora_unet_{key.rpartition('.')[0].replace('.', '_')}.{key.rpartition('.')[2]}": tensor
        for key, tensor in DIFFS.items()
    }
    pair = with_pair(ALPHA).tensors
    flat |= {
        "lora_unet_q_proj.lora_down.weight": pair["q_proj.lora_A.weight"],
        "lora_unet_q_proj.lora_up.weight": pair["q_proj.lora_B.weight"],
        "lora_unet_q_proj.alpha": pair["q_proj.alpha"],
    }
    save_file(flat, tmp_path / "kohya.safetensors")
    model = headed()
    report = manager_of(model, full_modules=FULL, bias=True).load(tmp_path / "kohya.safetensors")
    assert report.skipped == ()
    torch.testing.assert_close(model(X), changed(1.0)(X), rtol=1e-5, atol=1e-5)
    match = r"full_modules=\['classifier\.dense', 'classifier\.out_proj', 'norm'\] and bias=True"
    with pytest.raises(UnsupportedAdapterError, match=match):
        manager_of(headed(), full_modules=()).load(tmp_path / "kohya.safetensors")


def test_without_room_they_are_refused_by_count_and_kind_or_left_out():
    model = headed()
    manager = manager_of(model, full_modules=())
    before = Snapshot.of(manager, model)
    match = (
        r"2 diff_b \(q_proj\.diff_b, classifier\.dense\.diff_b\); 1 w_norm \(norm\.w_norm\); 1 "
        r"b_norm \(norm\.b_norm\); 2 diff \(.*\); build the SlotManager with full_modules=\["
        r"'norm', 'classifier\.dense', 'classifier\.out_proj'\] and bias=True, or pass strict=False"
    )
    with pytest.raises(UnsupportedAdapterError, match=match):
        manager.load(with_pair(DIFFS))
    before.assert_unchanged(manager, model)
    report = manager.load(with_pair(DIFFS), strict=False)
    assert dict(report.skipped) == {key: key.rpartition(".")[2] for key in DIFFS}
    assert report.modules == ("q_proj",)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"full_modules": FULL, "bias": True}])
def test_differences_of_zero_are_left_out_and_reported_without_any_option(options):
    model = headed()
    zeros = {key: torch.zeros_like(tensor) for key, tensor in DIFFS.items()}
    report = manager_of(model, **{"full_modules": (), **options}).load(with_pair(zeros))
    assert dict(report.skipped) == dict.fromkeys(zeros, "all zero")
    assert "norm.w_norm: all zero" in str(report)


def test_an_alpha_beside_a_difference_scales_nothing_and_is_reported():
    model = headed()
    source = with_pair({**DIFFS, "classifier.dense.alpha": torch.tensor(4.0)})
    report = manager_of(model, full_modules=FULL, bias=True).load(source)
    assert report.skipped == (("classifier.dense.alpha", "scales no diff"),)


@torch.no_grad()
def test_a_difference_is_added_in_float32_to_the_live_parameter():
    model = headed().to(torch.bfloat16)
    manager_of(model, full_modules=FULL, bias=True).load(with_pair(DIFFS))
    for name, key in (("norm.weight", "norm.w_norm"), ("classifier.dense.weight", None)):
        own = headed().to(torch.bfloat16).get_parameter(name).float()
        diff = DIFFS[key or "classifier.dense.diff"]
        module, _, parameter = name.rpartition(".")
        now = getattr(model.get_submodule(module), parameter)
        assert torch.equal(now, (own + diff).to(torch.bfloat16))


@torch.no_grad()
def test_several_files_of_differences_add_up_and_swap_without_a_recompile():
    torch._dynamo.reset()
    model = headed()
    manager = manager_of(model, full_modules=FULL, bias=True)
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    base = compiled(X)
    more = {"norm.w_norm": random(8, seed=9), "q_proj.diff_b": random(8, seed=10)}
    with manager.no_recompile():
        manager.load(read_adapter(DIFFS), "one")
        manager.load(read_adapter(more), "two")
        manager.set_adapters(["one", "two"], [0.5, 2.0])
        both = {key: 0.5 * DIFFS[key] for key in DIFFS}
        both |= {key: both[key] + 2.0 * more[key] for key in more}
        expected = changed(1.0, both, pair=False)(X)
        torch.testing.assert_close(compiled(X), expected, rtol=1e-5, atol=1e-5)
        manager.load(read_adapter(more), "one", activate=True)
        expected = changed(0.5, more, pair=False)(X)
        torch.testing.assert_close(compiled(X), expected, rtol=1e-5, atol=1e-5)
        manager.unload("one")
        manager.unload("two")
        assert torch.equal(compiled(X), base)
    assert backend.graphs == 1
    torch._dynamo.reset()


@torch.no_grad()
def test_in_a_pipeline_each_component_takes_its_own():
    unet, text_encoder = headed(), headed()
    components = {"unet": unet, "text_encoder": text_encoder}
    manager = SlotManager(components, max_rank=4, full_modules=["norm"], bias=True)
    one, two = random(8, seed=1), random(8, seed=2)
    flat = {"lora_unet_norm.w_norm": one, "lora_te_q_proj.diff_b": two}
    dotted = {"unet.norm.w_norm": one, "text_encoder.q_proj.diff_b": two}
    for tensors in (flat, dotted):
        report = manager.load(read_adapter(tensors))
        assert report.modules == ("unet.norm.weight", "text_encoder.q_proj")
        torch.testing.assert_close(unet.norm.weight, headed().norm.weight + one)
        assert torch.equal(text_encoder.norm.weight, headed().norm.weight)
        torch.testing.assert_close(text_encoder.q_proj(X), headed().q_proj(X) + two)
        manager.unload("default")
