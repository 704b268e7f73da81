"""Swap five LoRA styles in a compiled Stable Diffusion pipeline, text encoder included.

    python examples/styles.py [--backend inductor]

The pipeline is tiny and its weights are random, and so are the styles: what the pictures show is
that they differ. Its UNet and text encoder are compiled once. After that, files of five ranks, many
sets of layers and two scaling rules come and go, each by one call for both components, and nothing
is compiled again. Every picture is compared with the one that diffusers makes of the same file; all
of them end up in ``examples/output/styles.png``.
"""

from __future__ import annotations

import argparse
import string
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers.integrations.peft
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image, ImageDraw, ImageOps
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from lora_slots import LoadReport, SlotManager

OUTPUT = Path(__file__).resolve().parent / "output" / "styles.png"
PROMPTS = ("a quiet harbour", "a red kite")
STEPS = 4
SIZE = 64
MAX_RANK = 32
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
# What each style adapts, and how. The layers are those that trainers usually choose.
STYLES: dict[str, dict[str, dict[str, Any]]] = {
    "ink": {
        "unet": {"r": 4, "lora_alpha": 64, "target_modules": ATTENTION},
    },
    "chalk": {
        "unet": {"r": 8, "lora_alpha": 96, "target_modules": ATTENTION},
        "text_encoder": {"r": 2, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]},
    },
    "neon": {
        "unet": {"r": 32, "lora_alpha": 40, "use_rslora": True, "target_modules": ["to_q", "to_v"]},
        "text_encoder": {"r": 16, "lora_alpha": 64, "target_modules": ["q_proj", "out_proj"]},
    },
    "words": {
        "text_encoder": {"r": 6, "lora_alpha": 96, "target_modules": ["q_proj", "fc1", "fc2"]},
    },
    "tile": {
        "unet": {
            "r": 1, "lora_alpha": 16, "target_modules": [*ATTENTION, "ff.net.0.proj", "ff.net.2"],
            "rank_pattern": {"ff.net.2": 12}, "alpha_pattern": {"to_q": -9},
        },
    },
}  # fmt: skip
console = Console(width=max(Console().width, 100))


@dataclass(frozen=True)
class Row:
    """What one swap did."""

    name: str
    rank: str
    components: str
    swap_ms: float
    graphs: int
    effect: float
    difference: float


def tiny_pipeline() -> diffusers.StableDiffusionPipeline:
    """Stable Diffusion as it is, but for its size; the same random weights every time."""
    torch.manual_seed(7)
    letters = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    words = ["<|startoftext|>", *letters, "<|endoftext|>"]
    tokenizer = transformers.CLIPTokenizer(
        vocab={word: index for index, word in enumerate(words)}, merges=[], model_max_length=24
    )
    text_encoder = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=24, bos_token_id=0,
            eos_token_id=len(words) - 1, pad_token_id=len(words) - 1,
        )
    )  # fmt: skip
    unet = diffusers.UNet2DConditionModel(
        sample_size=SIZE // 2, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,
        cross_attention_dim=64, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(16, 32), latent_channels=4, norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    pipe = diffusers.StableDiffusionPipeline(
        unet=unet.eval(), vae=vae.eval(), text_encoder=text_encoder.eval(), tokenizer=tokenizer,
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def write_style(folder: Path, configs: Mapping[str, Mapping[str, Any]], seed: int) -> Path:
    """Let PEFT make a random adapter for some components, and diffusers save it."""
    pipe = tiny_pipeline()
    torch.manual_seed(seed)
    parts = {name: getattr(pipe, name) for name in configs}
    layers = {}
    for name, part in parts.items():
        part.add_adapter(LoraConfig(init_lora_weights=False, **configs[name]))
        layers[f"{name}_lora_layers"] = get_peft_model_state_dict(part, adapter_name="default")
    pipe.save_lora_weights(folder, **layers, **_collate_lora_metadata(parts))
    return folder


def paint(pipe: diffusers.StableDiffusionPipeline) -> Tensor:
    """One picture for each prompt, ``[prompts, 3, height, width]`` from 0 to 1, after all steps."""
    noise = torch.randn(len(PROMPTS), 4, 6, 6, generator=torch.Generator().manual_seed(1))
    latents = torch.nn.functional.interpolate(noise, size=SIZE // 2, mode="bicubic")
    return pipe(
        list(PROMPTS), num_inference_steps=STEPS, height=SIZE, width=SIZE, output_type="pt",
        latents=latents,
    ).images  # fmt: skip


def by_diffusers(path: Path) -> Tensor:
    """The pictures that diffusers itself makes with an adapter, eager."""
    pipe = tiny_pipeline()
    pipe.load_lora_weights(path, adapter_name="style")
    pipe.set_adapters("style")
    return paint(pipe)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show that something is under way, and for how long."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        progress.add_task(what, total=None)
        yield


def graph_count() -> int:
    """How many graphs Dynamo has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def swap(
    manager: SlotManager, pipe: diffusers.StableDiffusionPipeline, path: Path, base: Tensor
) -> tuple[Row, Tensor]:
    """Load one style over the last, and paint with it; nothing may be compiled."""
    graphs, started = graph_count(), time.perf_counter()
    report = manager.load(path)
    elapsed = (time.perf_counter() - started) * 1e3
    with manager.no_recompile():
        pictures = paint(pipe)
    row = Row(
        path.name, str(report.rank), components_in(report), elapsed, graph_count() - graphs,
        largest(pictures - base), largest(pictures - by_diffusers(path)),
    )  # fmt: skip
    return row, pictures


def largest(difference: Tensor) -> float:
    """The largest absolute value."""
    return difference.abs().max().item()


def components_in(report: LoadReport) -> str:
    """The components that an adapter was for."""
    return ", ".join(dict.fromkeys(module.split(".")[0] for module in report.modules))


def show(rows: list[Row]) -> None:
    """The table."""
    table = Table(title="lora_slots: five styles in one compiled pipeline", show_lines=True)
    for column in ("adapter", "rank", "components", "swap\nms", "recom-\npiles"):
        table.add_column(column, justify="right" if "\n" in column else "left")
    table.add_column("largest change\nof a pixel", justify="right")
    table.add_column("largest difference\nto diffusers", justify="right")
    for row in rows:
        table.add_row(
            row.name, row.rank, row.components, f"{row.swap_ms:.1f}", str(row.graphs),
            f"{row.effect:.2f}", f"{row.difference:.1e}",
        )  # fmt: skip
    console.print(table)


def save_grid(pictures: Mapping[str, Tensor], path: Path) -> None:
    """A column for each style and a row for each prompt; contrast is stretched for the eye."""
    cell, line = 2 * SIZE, 14
    grid = Image.new("RGB", (cell * len(pictures), (cell + line) * len(PROMPTS)), "white")
    draw = ImageDraw.Draw(grid)
    for column, (name, images) in enumerate(pictures.items()):
        for row, image in enumerate(images):
            pixels = (image.permute(1, 2, 0) * 255).round().byte().numpy()
            picture = ImageOps.autocontrast(Image.fromarray(pixels), cutoff=1)
            place = (column * cell, row * (cell + line))
            draw.text((place[0] + 3, place[1] + 1), f"{name}: {PROMPTS[row]}", fill="black")
            picture = picture.resize((cell, cell), Image.Resampling.NEAREST)
            grid.paste(picture, (place[0], place[1] + line))
    path.parent.mkdir(parents=True, exist_ok=True)
    grid.save(path)


def main(backend: str = "aot_eager", output: Path = OUTPUT) -> list[Row]:
    """Run the demonstration, write the grid, and return what the table shows."""
    torch.set_num_threads(1)  # layers this small only wait for a second thread
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()  # it would warn that torchvision is missing
    transformers.utils.logging.disable_progress_bar()
    # transformers 5.24 wants a PEFT that is not released yet before it loads into a text encoder,
    # as diffusers has it do for the comparison; with 0.21.2 that works.
    transformers.integrations.peft.MIN_PEFT_VERSION = "0.21.2"
    with tempfile.TemporaryDirectory() as folder:
        with doing("writing five styles as diffusers does"):
            files = {
                name: write_style(Path(folder) / name, configs, seed)
                for seed, (name, configs) in enumerate(STYLES.items())
            }
        pipe = tiny_pipeline()
        pictures = {"(none)": paint(pipe)}
        manager = SlotManager(pipe, max_rank=MAX_RANK)
        console.print(f"attached {manager}")
        pipe.unet = torch.compile(pipe.unet, backend=backend, dynamic=False)
        pipe.text_encoder = torch.compile(pipe.text_encoder, backend=backend, dynamic=False)
        with doing(f"compiling the UNet and the text encoder with {backend}"):
            base = paint(pipe)
        console.print(f"{graph_count()} graphs compiled; from here on none may be")
        rows = [Row("(none)", "", "", 0.0, 0, 0.0, largest(base - pictures["(none)"]))]
        with doing("swapping styles, and asking diffusers for the right pictures"):
            for name, path in files.items():
                row, pictures[name] = swap(manager, pipe, path, base)
                rows.append(row)
        manager.unload("default")
        with manager.no_recompile():
            left = largest(paint(pipe) - base)
        rows.append(Row("(unloaded)", "", "", 0.0, 0, left, left))
    show(rows)
    save_grid(pictures, output)
    console.print(f"pictures: {output}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="aot_eager", help="a backend of torch.compile")
    main(parser.parse_args().backend)
