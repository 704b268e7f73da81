"""One manager for a diffusers pipeline: one load fills its denoiser and its text encoders."""

from __future__ import annotations

from pipes import PIPES, by_diffusers, style_configs, write_lora, write_styles

import pytest
import torch
from toys import slot_buffers

from lora_slots import ArgumentError, AttachError, NotAttachedError, SlotManager

EACH = pytest.mark.parametrize("name", PIPES)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@EACH
def test_slots_change_nothing_and_all_of_them_run(name):
    kind = PIPES[name]
    pipe = kind.build()
    before = kind.run(pipe)
    manager = SlotManager(pipe, max_rank=4)
    assert tuple(manager.status().components) == kind.components
    manager.verify(lambda: kind.run(pipe))
    assert torch.equal(kind.run(pipe), before)


@EACH
def test_every_load_gives_the_image_that_diffusers_gives(name, tmp_path):
    kind = PIPES[name]
    files = write_styles(tmp_path, kind)
    pipe = kind.build()
    base = kind.run(pipe)
    manager = SlotManager(pipe, max_rank=16)
    for style, path in files.items():
        report = manager.load(path)
        expected = by_diffusers(kind, path)
        assert (expected - base).abs().max() > 1e-3, style
        close(kind.run(pipe), expected)
        assert report.skipped == ()
        adapted = {module.split(".")[0] for module in report.modules}
        assert adapted == set(style_configs(kind)[style])
    manager.unload("default")
    assert torch.equal(kind.run(pipe), base)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")  # by diffusers
def test_weights_and_mixes_are_those_of_diffusers(tmp_path):
    kind = PIPES["sd"]
    files = write_styles(tmp_path, kind)
    pipe = kind.build()
    manager = SlotManager(pipe, max_rank=16, num_slots=2)
    manager.load(files["both"], "both", weight=0.5)
    close(kind.run(pipe), by_diffusers(kind, files["both"], weight=0.5))
    manager.load(files["patterns"], "patterns")
    manager.set_adapters(["both", "patterns"], [-0.5, 0.75])
    reference = kind.build()
    for name in ("both", "patterns"):
        reference.load_lora_weights(files[name], adapter_name=name)
    reference.set_adapters(["both", "patterns"], [-0.5, 0.75])
    close(kind.run(pipe), kind.run(reference))


def test_a_mapping_of_components_is_as_good_as_the_pipeline(tmp_path):
    kind = PIPES["sdxl"]
    path = write_styles(tmp_path, kind)["both"]
    one, other = kind.build(), kind.build()
    SlotManager(one, max_rank=4).load(path)
    parts = {name: getattr(other, name) for name in kind.components}
    manager = SlotManager(parts, max_rank=4)
    manager.load(path)
    assert torch.equal(kind.run(one), kind.run(other))
    assert SlotManager.of(parts) is manager


def test_a_manager_of_one_component_takes_its_own_keys_and_reports_the_others(tmp_path):
    kind = PIPES["sd"]
    path = write_styles(tmp_path, kind)["both"]
    pipe, whole = kind.build(), kind.build()
    report = SlotManager(pipe.unet, max_rank=4).load(path)
    assert report.skipped
    assert all(key.startswith("text_encoder.") for key, _ in report.skipped)
    assert not any(module.startswith("unet.") for module in report.modules)
    SlotManager(whole, max_rank=4).load(path)
    for ours, theirs in zip(
        slot_buffers(pipe.unet).values(), slot_buffers(whole.unet).values(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_pipeline_without_a_text_encoder_loads_the_rest(tmp_path):
    kind = PIPES["sd"]
    files = write_styles(tmp_path, kind)
    pipe = kind.build()
    pipe.text_encoder = None
    manager = SlotManager(pipe, max_rank=8)
    assert tuple(manager.status().components) == ("unet",)
    assert manager.load(files["denoiser"]).skipped == ()
    assert manager.load(files["both"]).skipped


def test_of_finds_the_manager_of_a_pipeline_and_of_each_component():
    pipe = PIPES["sd"].build()
    with pytest.raises(NotAttachedError, match=r"this StableDiffusionPipeline has no SlotManager"):
        SlotManager.of(pipe)
    manager = SlotManager(pipe, max_rank=2)
    for model in (pipe, pipe.unet, pipe.text_encoder, {"unet": pipe.unet}):
        assert SlotManager.of(model) is manager
    with pytest.raises(NotAttachedError, match="this AutoencoderKL has no SlotManager"):
        SlotManager.of(pipe.vae)


def test_of_a_pipeline_with_two_managers_asks_for_one():
    pipe = PIPES["sd"].build()
    managers = [SlotManager(part, max_rank=2) for part in (pipe.unet, pipe.text_encoder)]
    with pytest.raises(NotAttachedError, match=r"2 SlotManagers; ask for that of one component"):
        SlotManager.of(pipe)
    assert SlotManager.of(pipe.text_encoder) is managers[1]


def test_a_pipeline_that_diffusers_loads_no_lora_into_is_refused():
    import diffusers

    unet = diffusers.UNet2DModel(
        block_out_channels=(8,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
        norm_num_groups=4,
    )  # fmt: skip
    pipe = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())
    with pytest.raises(ArgumentError, match=r"DDPMPipeline has none of .*pass .* as a mapping"):
        SlotManager(pipe, max_rank=2)


@pytest.mark.parametrize("name", ["sd", "flux", "sd3"])
def test_projections_that_diffusers_has_fused_are_refused_until_it_undoes_that(name, tmp_path):
    kind = PIPES[name]
    path = write_styles(tmp_path, kind)["both"]
    pipe = kind.build()
    model = getattr(pipe, kind.denoiser)
    model.fuse_qkv_projections()
    with pytest.raises(AttachError, match=rf"{kind.denoiser}\..*to_q is not called .*unfuse_qkv"):
        SlotManager(pipe, max_rank=4)
    assert slot_buffers(model) == {}
    SlotManager(pipe.text_encoder, max_rank=4).detach()
    model.unfuse_qkv_projections()
    manager = SlotManager(pipe, max_rank=4)
    model.fuse_qkv_projections()
    with pytest.raises(AttachError, match=r"to_q is not called"):
        manager.load(path)
    model.unfuse_qkv_projections()
    manager.load(path)
    close(kind.run(pipe), by_diffusers(kind, path))


def test_components_keep_their_own_dtype():
    kind = PIPES["sd"]
    pipe = kind.build()
    pipe.text_encoder.to(torch.bfloat16)
    components = SlotManager(pipe, max_rank=2).status().components
    assert components["unet"].dtypes == (torch.float32,)
    assert components["text_encoder"].dtypes == (torch.bfloat16,)
    assert components["text_encoder"].modules == 12
    sizes = sum(
        buffer.numel() * buffer.element_size() for buffer in slot_buffers(pipe.unet).values()
    )
    assert components["unet"].nbytes == sizes


def test_from_adapters_covers_exactly_what_the_files_adapt(tmp_path):
    kind = PIPES["sd"]
    configs = {
        "unet": {"r": 3, "target_modules": ["to_q"]},
        "text_encoder": {"r": 5, "target_modules": ["out_proj"]},
    }
    paths = [
        write_lora(tmp_path / name, kind.build(), {name: config}, seed=0)
        for name, config in configs.items()
    ]
    pipe = kind.build()
    manager = SlotManager.from_adapters(pipe, paths)
    assert manager.status().max_rank == 5
    assert {name: part.modules for name, part in manager.status().components.items()} == {
        "unet": 4,
        "text_encoder": 2,
    }
    for path in paths:
        manager.load(path)
        close(kind.run(pipe), by_diffusers(kind, path))


def test_convolutions_take_adapters_where_they_are_named(tmp_path):
    kind = PIPES["sd"]
    names = ["to_q", "conv1", "proj_in", "conv_shortcut"]
    config = {"r": 3, "lora_alpha": 6, "target_modules": names}
    path = write_lora(tmp_path, kind.build(), {"unet": config}, seed=4)
    pipe = kind.build()
    manager = SlotManager(pipe, max_rank=4, target_modules={"unet": names})
    report = manager.load(path)
    assert {module.rsplit(".", 1)[1] for module in report.modules} == set(names)
    manager.verify(lambda: kind.run(pipe))
    close(kind.run(pipe), by_diffusers(kind, path))
