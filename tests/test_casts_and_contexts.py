"""Moves, casts, inference mode, default dtypes and devices leave slots right."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import (
    TOY_MODULES,
    Toy,
    expected_toy,
    pairs,
    slot_buffers,
    toy,
    toy_adapter,
    toy_input,
)

from lora_slots import AttachError, SlotManager, UnsupportedAdapterError, read_adapter

CASTS = {
    "to(float64)": (lambda m: m.to(torch.float64), torch.float64),
    "double": (lambda m: m.double(), torch.float64),
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "to(cpu, float16)": (lambda m: m.to("cpu", torch.float16), torch.float16),
    "type": (lambda m: m.type(torch.float64), torch.float64),
    "there and back": (lambda m: m.double().float(), torch.float32),
    "to(cpu)": (lambda m: m.to("cpu"), torch.float32),
    "float": (lambda m: m.float(), torch.float32),
}


def oracle(seed: int = 0, rank: int = 4) -> torch.Tensor:
    parts = pairs(dict.fromkeys(TOY_MODULES, rank), seed=seed)
    return expected_toy(toy(), toy_input(), parts, dict.fromkeys(TOY_MODULES, 8 / rank))


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    wide = {torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(dtype, 1e-5)
    return {"rtol": wide, "atol": 10 * wide if wide > 1e-3 else 1e-5}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("loaded", ["before", "after", "both"])
def test_slots_follow_every_cast_and_scaling_stays_float32(cast, loaded):
    do, dtype = CASTS[cast]
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=2)
    if loaded != "after":
        manager.load(toy_adapter(seed=1 if loaded == "both" else 0))
    scaling = {n: b.clone() for n, b in slot_buffers(model).items() if "scaling" in n}
    do(model)
    for name, buffer in slot_buffers(model).items():
        assert buffer.dtype == (torch.float32 if "scaling" in name else dtype), name
        assert "scaling" not in name or torch.equal(buffer, scaling[name])
    if loaded != "before":
        manager.load(toy_adapter())
    output = model(toy_input().to(dtype))
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), oracle(), **tolerance(dtype))
    (component,) = manager.status().components.values()
    assert component.dtypes == (dtype,)
    manager.unload("default")
    base = do(toy())(toy_input().to(dtype))
    assert torch.equal(model(toy_input().to(dtype)), base)


def test_a_scaling_that_bfloat16_cannot_hold_survives_a_cast():
    model = toy()
    manager = SlotManager(model, max_rank=4)
    manager.load(toy_adapter(4, alpha=1.2345678), weight=1.1)
    model.bfloat16()
    expected = torch.tensor(1.2345678 / 4 * 1.1, dtype=torch.float64).float()
    for name in TOY_MODULES:
        factor = model.get_submodule(name).lora_slots.by_row()
        torch.testing.assert_close(factor, expected.expand(1, 4), rtol=1e-7, atol=0)


def test_a_move_to_where_the_model_is_moves_no_buffer():
    model = toy()
    SlotManager(model, max_rank=4)
    before = {name: b.data_ptr() for name, b in slot_buffers(model).items()}
    model.to("cpu").float()
    assert {name: b.data_ptr() for name, b in slot_buffers(model).items()} == before


@pytest.mark.parametrize("built_in", [True, False])
@pytest.mark.parametrize("loaded_in", [True, False])
def test_inference_mode_at_construction_or_load_leaves_slots_writable(built_in, loaded_in):
    model = toy()
    with torch.inference_mode(built_in):
        manager = SlotManager(model, max_rank=8, num_slots=2)
    with torch.inference_mode(loaded_in):
        manager.load(toy_adapter(8, seed=1))
        manager.load(toy_adapter(4, seed=2), "other")
        manager.set_adapters(["default", "other"], [0.5, 2.0])
    assert not any(buffer.is_inference() for buffer in slot_buffers(model).values())
    manager.set_weight("other", 0.0)
    manager.unload("other")
    for seed in range(3):
        manager.load(toy_adapter(8, seed=seed))
    manager.load(toy_adapter(4), weight=1.0, activate=True)
    torch.testing.assert_close(model(toy_input()), oracle(), rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        manager.unload("default")
        assert torch.equal(model(toy_input()), toy()(toy_input()))


def test_a_cast_under_inference_mode_leaves_slots_writable():
    model = toy()
    manager = SlotManager(model, max_rank=8)
    manager.load(toy_adapter(8, seed=1))
    with torch.inference_mode():
        model.double()
    manager.load(toy_adapter(4))
    torch.testing.assert_close(model(toy_input().double()).float(), oracle(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_users_default_dtype_does_not_matter(dtype):
    model, adapter, x = toy(), toy_adapter(alpha=1.2345678), toy_input()
    torch.set_default_dtype(dtype)
    try:
        manager = SlotManager(model, max_rank=4)
        manager.load(adapter)
        manager.set_weight("default", 0.3)
        manager.set_weight("default", 1.1)
        output = model(x)
    finally:
        torch.set_default_dtype(torch.float32)
    plain = toy()
    SlotManager(plain, max_rank=4).load(adapter, weight=1.1)
    for name, buffer in slot_buffers(plain).items():
        assert torch.equal(slot_buffers(model)[name], buffer), name
        assert slot_buffers(model)[name].dtype == torch.float32
    assert torch.equal(output, plain(x))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_users_default_device_does_not_matter(device, tmp_path):
    adapter = toy_adapter()
    model = toy()
    with torch.device(device):
        manager = SlotManager(model, max_rank=8, num_slots=2)
        manager.load(adapter, "a")
        manager.load(adapter, "b")
        manager.set_adapters(["a", "b"], [0.25, 0.75])
    assert {b.device.type for b in slot_buffers(model).values()} == {"cpu"}
    torch.testing.assert_close(model(toy_input()), oracle(), rtol=1e-5, atol=1e-5)


def test_a_meta_model_takes_slots_and_refuses_loads_naming_the_layer():
    with torch.device("meta"):
        model = Toy()
    manager = SlotManager(model, max_rank=4)
    assert all(buffer.is_meta for buffer in slot_buffers(model).values())
    for call in (manager.load, manager.check):
        with pytest.raises(AttachError, match=r"layers\.0\.q_proj is on the meta device"):
            call(toy_adapter())
    assert manager.loaded_adapters == ()


def test_a_meta_model_with_slots_still_tells_shapes():
    with torch.device("meta"):
        model = Toy()
    assert model(toy_input().to("meta")).shape == (2, 2, 3, 6)
    SlotManager(model, max_rank=4)
    assert model(toy_input().to("meta")).shape == (2, 2, 3, 6)


def test_a_meta_model_that_is_materialised_has_empty_slots():
    with torch.device("meta"):
        model = Toy().eval()
    manager = SlotManager(model, max_rank=4)
    torch.use_deterministic_algorithms(True)  # fresh memory is filled with NaN
    try:
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    model.load_state_dict(toy().state_dict())
    assert torch.equal(model(toy_input()), toy()(toy_input()))
    assert all(buffer.count_nonzero() == 0 for buffer in slot_buffers(model).values())
    manager.load(toy_adapter())
    torch.testing.assert_close(model(toy_input()), oracle(), rtol=1e-5, atol=1e-5)


def test_one_meta_layer_of_several_is_named():
    model = toy()
    model.model.layers[1].q_proj = nn.Linear(8, 6, bias=False, device="meta")
    manager = SlotManager(model, max_rank=4)
    with pytest.raises(AttachError, match=r"layers\.1\.q_proj is on the meta device"):
        manager.load(toy_adapter())
    assert all(
        buffer.is_meta or buffer.count_nonzero() == 0 for buffer in slot_buffers(model).values()
    )
    assert manager.load(toy_adapter(modules=TOY_MODULES[:2])).modules == TOY_MODULES[:2]


def test_inputs_of_any_number_of_dimensions_and_of_no_rows_work():
    model = toy()
    manager = SlotManager(model, max_rank=4)
    manager.load(toy_adapter())
    flat = model.model.layers[0].q_proj(toy_input(12))
    layer = model.model.layers[0].q_proj
    shaped = layer(toy_input(12).reshape(2, 3, 2, 8))
    torch.testing.assert_close(shaped, flat.reshape(2, 3, 2, 6), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer(toy_input(12)[5]), flat[5], rtol=1e-6, atol=1e-6)
    assert layer(toy_input(12)[:0]).shape == (0, 6)
    strided = toy_input(12).T.contiguous().T
    torch.testing.assert_close(layer(strided), flat, rtol=1e-5, atol=1e-5)


def test_an_unsupported_feature_is_refused_whatever_the_dtype():
    model = toy().half()
    manager = SlotManager(model, max_rank=4)
    key = f"base_model.model.{TOY_MODULES[0]}.lora_magnitude_vector"
    tensors = {**toy_adapter().tensors, key: torch.ones(6)}
    with pytest.raises(UnsupportedAdapterError, match="DoRA"):
        manager.load(read_adapter(tensors))
    assert all(buffer.count_nonzero() == 0 for buffer in slot_buffers(model).values())
