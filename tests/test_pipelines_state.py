"""Components stand or fall together: attaching, writing, copying and detaching."""

from __future__ import annotations

import copy
import pickle
from pipes import PIPES, write_styles

import pytest
import torch
from faults import Fault
from torch import nn
from toys import Snapshot, places, slot_buffers, toy

from lora_slots import AttachError, NotAttachedError, SlotManager


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_styles(tmp_path_factory.mktemp("styles"), KIND)


KIND = PIPES["sd"]


def parts_of(pipe):
    return {name: getattr(pipe, name) for name in KIND.components}


def root(pipe) -> nn.Module:
    """One module over all components, to look at their buffers."""
    return nn.ModuleDict(parts_of(pipe))


def picture(pipe) -> object:
    return {
        path: (type(m), list(vars(m)), list(m._modules), list(m._buffers), list(m._parameters))
        for path, m in root(pipe).named_modules()
        if path
    }


def test_a_failed_attach_of_a_later_component_leaves_the_earlier_ones_as_they_came():
    pipe = KIND.build()
    before = picture(pipe)
    layer = pipe.text_encoder.get_submodule("encoder.layers.1.mlp.fc2")
    layer.forward = lambda x: x
    with pytest.raises(AttachError, match=r"text_encoder\.encoder\.layers\.1\.mlp\.fc2 has a forw"):
        SlotManager(pipe, max_rank=2)
    del layer.forward
    assert picture(pipe) == before
    with pytest.raises(NotAttachedError):
        SlotManager.of(pipe.unet)
    SlotManager(pipe, max_rank=2)


class Final(nn.Linear):
    """A class that takes no subclasses, which only shows when the class is swapped."""

    def __init_subclass__(cls) -> None:
        raise TypeError("final")


def test_an_attach_that_dies_in_a_later_component_is_undone():
    pipe = KIND.build()
    pipe.text_encoder.get_submodule("encoder.layers.1").mlp.fc2 = Final(48, 32)
    before = picture(pipe)
    with pytest.raises(TypeError, match="final"):
        SlotManager(pipe, max_rank=2)
    assert picture(pipe) == before


def test_detach_leaves_every_component_as_it_came(files):
    pipe = KIND.build()
    before, image = picture(pipe), KIND.run(pipe)
    manager = SlotManager(pipe, max_rank=16)
    manager.load(files["both"])
    assert not torch.equal(KIND.run(pipe), image)
    manager.detach()
    assert picture(pipe) == before
    assert torch.equal(KIND.run(pipe), image)
    for part in (pipe, pipe.unet, pipe.text_encoder):
        with pytest.raises(NotAttachedError):
            SlotManager.of(part)
    SlotManager(pipe.text_encoder, max_rank=2)


def test_a_refused_file_changes_nothing_in_any_component(files):
    pipe = KIND.build()
    manager = SlotManager(pipe, max_rank=8)
    manager.load(files["both"])
    before, image = Snapshot.of(manager, root(pipe)), KIND.run(pipe)
    # Its text encoder's rank is 16, while what it has for the UNet would fit.
    with pytest.raises(ValueError, match=r"rank 16 at text_encoder\..*max_rank=16"):
        manager.load(files["patterns"])
    before.assert_unchanged(manager, root(pipe))
    assert torch.equal(KIND.run(pipe), image)


@pytest.mark.parametrize("number", [1, 2])
def test_a_write_that_dies_is_rolled_back_in_all_components(files, number):
    pipe = KIND.build()
    manager = SlotManager(pipe, max_rank=16)
    manager.load(files["both"])
    before = Snapshot.of(manager, root(pipe))
    with (
        pytest.raises(RuntimeError, match="fault"),
        Fault(number - 1, RuntimeError("fault"), pipe.text_encoder),
    ):
        manager.load(files["patterns"])
    before.assert_unchanged(manager, root(pipe))
    manager.load(files["patterns"])


def by_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_components_copied_together_get_one_manager_of_their_own(files, copied):
    parts = {"unet": toy(1), "text_encoder": toy(2)}
    manager = SlotManager(parts, max_rank=4)
    twins = copied(parts)
    other = SlotManager.of(twins)
    assert other is not manager
    assert SlotManager.of(twins["text_encoder"]) is other
    ours, theirs = nn.ModuleDict(parts), nn.ModuleDict(twins)
    Snapshot.of(manager, ours).assert_unchanged(other, theirs)
    memory = {place for _, place in places(ours).values()}
    assert memory.isdisjoint(place for _, place in places(theirs).values())
    other.detach()
    assert slot_buffers(theirs) == {}
    assert SlotManager.of(parts) is manager


def test_a_copied_pipeline_has_a_manager_of_its_own(files):
    pipe = KIND.build()
    manager = SlotManager(pipe, max_rank=16)
    manager.load(files["both"])
    twin = copy.deepcopy(pipe)
    other = SlotManager.of(twin)
    image = KIND.run(pipe)
    assert torch.equal(KIND.run(twin), image)
    other.load(files["encoders"])
    assert not torch.equal(KIND.run(twin), image)
    assert torch.equal(KIND.run(pipe), image)
    manager.unload("default")
    assert torch.equal(KIND.run(pipe), KIND.run(KIND.build()))
    assert other.loaded_adapters == ("default",)


def test_a_copied_component_brings_copies_of_the_others_along():
    parts = {"unet": toy(1), "text_encoder": toy(2)}
    manager = SlotManager(parts, max_rank=4)
    twin = copy.deepcopy(parts["unet"])
    other = SlotManager.of(twin)
    assert other is not manager
    assert other.status().components.keys() == {"unet", "text_encoder"}
    assert SlotManager.of({"unet": twin}) is other


def test_a_replaced_component_is_found_by_verify():
    pipe = KIND.build()
    manager = SlotManager(pipe, max_rank=2)
    pipe.text_encoder = KIND.build().text_encoder
    with pytest.raises(ValueError, match=r"12 of 42 target modules were never called.*text_enc"):
        manager.verify(lambda: KIND.run(pipe))
