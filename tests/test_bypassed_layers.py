"""Layers whose weight a model reads without calling them are refused, made to run, or found."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import pairs, tensors_of, toy, toy_adapter, toy_input

from lora_slots import AttachError, SlotManager, TargetMismatchError, read_adapter


@pytest.fixture
def no_fast_path():
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return Encoder().eval()


LINEAR1 = [f"encoder.layers.{i}.linear1" for i in range(2)]
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))


def linear1_adapter():
    return read_adapter(tensors_of(pairs(dict.fromkeys(LINEAR1, 4), inputs=8, outputs=16)))


def test_targets_behind_the_fast_path_are_refused_with_the_remedy(encoder):
    remedy = r"layers\.0\.linear1 is inside an nn\.TransformerEncoderLayer.*set_fastpath_enabled"
    with pytest.raises(AttachError, match=remedy):
        SlotManager(encoder, max_rank=4)
    assert type(encoder.encoder.layers[0].linear1) is nn.Linear


def test_targets_beside_the_fast_path_are_welcome(encoder):
    base = encoder(X)
    manager = SlotManager(encoder, max_rank=4, target_modules=["head"])
    manager.load(toy_adapter(modules=["head"]))
    assert (encoder(X) != base).any(dim=-1).all()


@pytest.mark.usefixtures("no_fast_path")
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_without_the_fast_path_an_adapter_is_exactly_a_changed_weight(encoder, mode):
    changed = copy.deepcopy(encoder)
    adapter = linear1_adapter()
    for index, path in enumerate(LINEAR1):
        A, B = (adapter.tensors[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB")
        changed.encoder.layers[index].linear1.weight.data += B @ A
    manager = SlotManager(encoder, max_rank=4)
    with mode():
        base = encoder(X)
        manager.load(adapter)
        output, expected = encoder(X), changed(X)
        manager.unload("default")
        assert torch.equal(encoder(X), base)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert (output - base).abs().max() > 0.1


@pytest.mark.usefixtures("no_fast_path")
def test_a_padding_mask_changes_nothing_about_that(encoder):
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = True
    manager = SlotManager(encoder, max_rank=4)
    with torch.inference_mode():
        base = encoder.encoder(X, src_key_padding_mask=mask)
        manager.load(linear1_adapter())
        assert not torch.equal(encoder.encoder(X, src_key_padding_mask=mask), base)


def test_turning_the_fast_path_on_again_makes_a_load_an_error(encoder):
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        manager = SlotManager(encoder, max_rank=4)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    for call in (manager.load, manager.check):
        with pytest.raises(AttachError, match="set_fastpath_enabled"):
            call(linear1_adapter())
    assert manager.loaded_adapters == ()


def test_verify_finds_what_the_fast_path_skips(encoder):
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        manager = SlotManager(encoder, max_rank=4)
        manager.verify(lambda: encoder(X))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with torch.inference_mode(), pytest.raises(TargetMismatchError, match="never called"):
        manager.verify(lambda: encoder(X))


@torch.no_grad()
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("fast_path", [True, False])
def test_attention_in_an_encoder_layer_is_adapted_with_and_without_the_fast_path(
    encoder, mode, fast_path
):
    path = "encoder.layers.0.self_attn"
    update = pairs({path: 4}, inputs=8, outputs=24) | pairs({f"{path}.out_proj": 4}, outputs=8)
    changed = copy.deepcopy(encoder)
    for module, parameter in ((path, "in_proj_weight"), (f"{path}.out_proj", "weight")):
        A, B = update[module]
        getattr(changed.get_submodule(module), parameter).data += B @ A
    torch.backends.mha.set_fastpath_enabled(fast_path)
    try:
        manager = SlotManager(encoder, max_rank=4, target_modules=["self_attn"])
        with mode():
            base = encoder(X)
            manager.load(read_adapter(tensors_of(update)))
            output, expected = encoder(X), changed(X)
            manager.verify(lambda: encoder(X))
            manager.unload("default")
            assert torch.equal(encoder(X), base)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert (output - base).abs().max() > 0.1


@torch.no_grad()
def test_a_norm_behind_the_fast_path_can_be_replaced(encoder):
    changed = copy.deepcopy(encoder)
    manager = SlotManager(encoder, max_rank=4, target_modules=["head"], full_modules=["norm1"])
    base = encoder(X)
    manager.load(read_adapter({"encoder.layers.1.norm1.w_norm": torch.ones(8)}))
    changed.encoder.layers[1].norm1.weight.data += 1
    torch.testing.assert_close(encoder(X), changed(X), rtol=1e-5, atol=1e-5)
    manager.unload("default")
    assert torch.equal(encoder(X), base)


def test_an_attention_that_is_the_model_itself_offers_its_output_projection():
    model = nn.MultiheadAttention(8, 2)
    manager = SlotManager(model, max_rank=4)
    x = torch.randn(3, 2, 8)
    manager.verify(lambda: model(x, x, x))
    assert hasattr(model.out_proj, "lora_slots")


class Functional(nn.Module):
    """Reads one weight itself, and calls another layer only sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(8, 6)
        self.called = nn.Linear(8, 6)
        self.sometimes = nn.Linear(8, 6)

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        y = F.linear(x, self.read.weight) + self.called(x)
        return y + self.sometimes(x) if both else y


def test_verify_lists_the_layers_that_were_never_called():
    model = Functional()
    manager = SlotManager(model, max_rank=4)
    match = r"2 of 3 target modules were never called.*read, sometimes; leave them out"
    with pytest.raises(TargetMismatchError, match=match):
        manager.verify(lambda: model(toy_input()))
    with pytest.raises(TargetMismatchError, match=r"1 of 3 .*: read;"):
        manager.verify(lambda: model(toy_input(), both=True))


def test_verify_runs_a_compiled_model_eagerly_and_leaves_its_graph():
    model = toy()
    manager = SlotManager(model, max_rank=4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(toy_input())
    calls = []
    with manager.no_recompile():
        manager.verify(lambda: calls.append(compiled(toy_input())))
        assert torch.equal(compiled(toy_input()), calls[0])
    assert len(calls) == 1


def test_verify_passes_an_error_of_the_function_on():
    manager = SlotManager(toy(), max_rank=4)
    with pytest.raises(ZeroDivisionError):
        manager.verify(lambda: 1 / 0)


def test_verify_writes_nothing_and_counts_other_models_for_nothing():
    model, other = toy(), toy()
    manager = SlotManager(model, max_rank=4)
    SlotManager(other, max_rank=4)
    with pytest.raises(TargetMismatchError, match="4 of 4"):
        manager.verify(lambda: other(toy_input()))
