"""Whole denoising runs through five adapters: nothing is compiled again, the images are right."""

from __future__ import annotations

from dataclasses import replace
from pipes import PIPES, by_diffusers, unet, write_styles

import pytest
import torch
from toys import INDUCTOR_WARNING, CountingBackend

from lora_slots import RecompileError, SlotManager


def swap_through(kind, pipe, manager, files, *, atol):
    """Load every adapter in turn, and compare each image with diffusers' own."""
    for path in files.values():
        with manager.no_recompile():
            manager.load(path)
            image = kind.run(pipe)
        torch.testing.assert_close(image, by_diffusers(kind, path), rtol=0, atol=atol)


@pytest.mark.parametrize(
    "name", ["sd", *(pytest.param(name, marks=pytest.mark.slow) for name in PIPES if name != "sd")]
)
def test_five_adapters_pass_through_a_compiled_denoiser(name, tmp_path):
    kind = PIPES[name]
    files = write_styles(tmp_path, kind)
    pipe = kind.build()
    manager = SlotManager(pipe, max_rank=16)
    backend = CountingBackend()
    for component in kind.components if name == "sd" else kind.components[:1]:
        setattr(pipe, component, torch.compile(getattr(pipe, component), backend=backend))
    base = kind.run(pipe)
    assert torch.equal(base, kind.run(kind.build()))
    graphs = backend.graphs
    assert graphs >= 1
    swap_through(kind, pipe, manager, files, atol=1e-5)
    with manager.no_recompile():
        manager.unload("default")
        assert torch.equal(kind.run(pipe), base)
    assert backend.graphs == graphs
    assert SlotManager.of(pipe) is manager


def test_diffusers_own_hotswap_recompiles_or_refuses_where_slots_do_not(tmp_path):
    """The twin of the test above: without slots the same files cannot pass."""
    kind = PIPES["sd"]
    files = write_styles(tmp_path, kind)
    pipe = kind.build()
    pipe.enable_lora_hotswap(target_rank=16)
    pipe.load_lora_weights(files["denoiser"], adapter_name="default")
    with pytest.raises(ValueError, match="not supported for text encoders"):
        pipe.load_lora_weights(files["both"], adapter_name="default", hotswap=True)


def test_a_recompile_of_one_component_is_an_error():
    kind = PIPES["sd"]
    pipe = kind.build()
    manager = SlotManager(pipe, max_rank=2)
    pipe.text_encoder.compile(backend="eager", dynamic=False)
    kind.run(pipe)
    with pytest.raises(RecompileError), manager.no_recompile():
        pipe(prompt=["a", "b"], num_inference_steps=1, height=32, width=32, output_type="latent")


def test_a_pipeline_compiled_before_it_gets_slots_is_unwrapped_with_a_warning(tmp_path):
    kind = PIPES["sd"]
    path = write_styles(tmp_path, kind)["both"]
    pipe = kind.build()
    pipe.text_encoder = torch.compile(pipe.text_encoder, backend="aot_eager")
    with pytest.warns(UserWarning, match="compiled before it got slots"):
        manager = SlotManager(pipe, max_rank=4)
    report = manager.load(path)
    assert all("_orig_mod" not in module for module in report.modules)
    torch.testing.assert_close(kind.run(pipe), by_diffusers(kind, path), rtol=0, atol=1e-5)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.filterwarnings(INDUCTOR_WARNING)
def test_a_pipeline_compiled_with_inductor_takes_all_five(tmp_path):
    kind = PIPES["sd"]
    kind = replace(kind, build=smaller)
    files = write_styles(tmp_path, kind)
    pipe = kind.build()
    manager = SlotManager(pipe, max_rank=16)
    pipe.unet.compile(dynamic=False)
    kind.run(pipe)
    swap_through(kind, pipe, manager, files, atol=1e-4)


def smaller():
    """The kernels of every block cost seconds."""
    pipe = PIPES["sd"].build()
    torch.manual_seed(12)
    pipe.unet = unet(
        32, block_out_channels=(16,), down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("UpBlock2D",),
    ).eval()  # fmt: skip
    return pipe
