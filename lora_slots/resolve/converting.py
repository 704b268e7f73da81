"""Modules under another architecture's names -> the model's own, as diffusers converts them.

A file may name the modules of the code that it was trained with (the SGM blocks of SDXL, Flux as
its authors wrote it, Wan, Hunyuan, ...) rather than those of the model in diffusers. Which is which
is what diffusers' LoRA loaders know. They are not given the tensors of the file, since each of them
scales, cuts and copies in a way of its own, but numbered stand-ins of one column: where the numbers
come out tells which rows of which module go where.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_slots.errors import UnsupportedAdapterError
from lora_slots.layout import Layout, spellings
from lora_slots.reading.keys import split_key

_SD = "StableDiffusionXLLoraLoaderMixin"
# The function itself: the loader calls it only for files with one kind of layer.
_HUNYUAN = "_convert_hunyuan_video_lora_to_diffusers"
# The loader of diffusers that reads the files made for a class of model. Where a loader does no
# more than take a prefix off, its classes are left out.
_LOADERS = {
    "AceStepTransformer1DModel": "AceStepLoraLoaderMixin",
    "BriaFiboTransformer2DModel": "FluxLoraLoaderMixin",
    "ChromaTransformer2DModel": "FluxLoraLoaderMixin",
    "ChronoEditTransformer3DModel": "WanLoraLoaderMixin",
    "CosmosTransformer3DModel": "AnimaLoraLoaderMixin",
    "Flux2Transformer2DModel": "Flux2LoraLoaderMixin",
    "Flux3Transformer2DModel": "Flux3LoraLoaderMixin",
    "FluxTransformer2DModel": "FluxLoraLoaderMixin",
    "HeliosTransformer3DModel": "HeliosLoraLoaderMixin",
    "HunyuanVideoFramepackTransformer3DModel": _HUNYUAN,
    "HunyuanVideoTransformer3DModel": _HUNYUAN,
    "Ideogram4Transformer2DModel": "Ideogram4LoraLoaderMixin",
    "Krea2Transformer2DModel": "Krea2LoraLoaderMixin",
    "LTX2VideoTransformer3DModel": "LTX2LoraLoaderMixin",
    "Lumina2Transformer2DModel": "Lumina2LoraLoaderMixin",
    "MiniMaxH3Transformer3DModel": "MiniMaxH3LoraLoaderMixin",
    "QwenImageTransformer2DModel": "QwenImageLoraLoaderMixin",
    "SkyReelsV2Transformer3DModel": "SkyReelsV2LoraLoaderMixin",
    "UNet2DConditionModel": _SD,
    "UNetMotionModel": _SD,
    "WanAnimateTransformer3DModel": "WanLoraLoaderMixin",
    "WanTransformer3DModel": "WanLoraLoaderMixin",
    "WanVACETransformer3DModel": "WanLoraLoaderMixin",
    "ZImageTransformer2DModel": "ZImageLoraLoaderMixin",
}
# What trainers and user interfaces put before a module's name.
_PREFIXES = ("model.", "diffusion_model.", "transformer.", "unet.")
# How the names of text encoders' modules begin, which are the model's own or are not there.
_OTHERS = ("lora_te", "text_encoder")
# How many modules are asked for one by one before all are.
_SAMPLES = 8
# The numbers of a module's rows begin at a multiple of this.
_STRIDE = 2**32
_LOGGER = "diffusers.loaders.lora_conversion_utils"

# The rank and the number of outputs of each module, by its name in the file.
Sizes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Place:
    """Where a module of a file belongs, or a part of its outputs.

    Attributes:
        path: The model's own module.
        rows: Which rows of ``lora_B``, and of all else that has one row for each output; None: all
            of them, in order.
    """

    path: str
    rows: slice | Tensor | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The part of ``tensor [out, ...]`` that belongs here; no copy where rows are adjacent."""
        return tensor if self.rows is None else tensor[self.rows]


def places_of(modules: Sizes, layout: Layout) -> dict[str, tuple[Place, ...]]:
    """Find the places of modules that the model does not have under the names of the file.

    Args:
        modules: What is looked for.
        layout: The model.

    Returns:
        The places of each module for which diffusers knows them; together they take each output
        once.

    Raises:
        UnsupportedAdapterError: diffusers is needed for that, and is not installed.
    """
    modules = {name: sizes for name, sizes in modules.items() if not name.startswith(_OTHERS)}
    model = next(layout.instances_of(_LOADERS), None) if modules else None
    if model is None:
        return {}
    root, instance = model
    convert, paths = _converter(instance), _Paths(layout, root)
    found: dict[str, tuple[Place, ...]] = {}
    for dialect in _DIALECTS:
        found |= _ask(convert, _without(modules, found), dialect, paths)
    # Most files are read whole. Where one bad name makes a converter refuse all, parts are.
    for dialect in _DIALECTS:
        left = _without(modules, found)
        samples = itertools.islice(left.items(), 0, None, 1 + len(left) // _SAMPLES)
        if any(_ask(convert, dict([item]), dialect, paths) for item in samples):
            found |= _ask_in_parts(convert, left, dialect, paths)
    return found


def _without(modules: Sizes, found: Container[str]) -> Sizes:
    return {name: sizes for name, sizes in modules.items() if name not in found}


@dataclass(frozen=True)
class _Dialect:
    """One way to write keys.

    Converters tell formats apart by how the two tensors of a module are called, or by a prefix, and
    know the same module under some of these only. So a module is asked for in each of them.
    """

    name: Callable[[str], str]
    down: str = ".lora_down.weight"
    up: str = ".lora_up.weight"
    with_alpha: bool = False


def _literal(name: str) -> str:
    return name


def _bare(name: str) -> str:
    name = spellings(name)[-1]
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _prefixed(name: str) -> str:
    return f"diffusion_model.{_bare(name)}"


def _flat(name: str) -> str:
    return f"lora_unet_{_bare(name).replace('.', '_')}"


# Some converters need an alpha, others take one for a key that they do not know.
_DIALECTS = (
    _Dialect(_literal),
    _Dialect(_literal, with_alpha=True),
    _Dialect(_literal, ".lora_A.weight", ".lora_B.weight"),
    _Dialect(_literal, ".down.weight", ".up.weight"),
    _Dialect(_prefixed),
    _Dialect(_prefixed, ".lora_A.weight", ".lora_B.weight"),
    _Dialect(_bare, ".lora_A.weight", ".lora_B.weight"),
    _Dialect(_flat),
)

_Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def _converter(model: nn.Module) -> _Convert:
    """The function of diffusers that brings keys into its own names for this kind of model."""
    name = next(_LOADERS[c.__name__] for c in type(model).__mro__ if c.__name__ in _LOADERS)
    try:
        from diffusers.loaders import lora_pipeline

        loader: Any = getattr(lora_pipeline, name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedAdapterError(
            "the adapter's module names are not those of this model; if they are those of another "
            f"implementation of {type(model).__name__}, diffusers knows them: install "
            f"lora-slots[diffusers] ({error})"
        ) from error
    convert = getattr(loader, "lora_state_dict", loader)
    if name == _SD:
        # This one returns the alphas, too.
        return lambda keys: dict(convert(keys, unet_config=model.config)[0])
    return lambda keys: dict(convert(keys))


@dataclass(frozen=True, eq=False)
class _Paths:
    """The model's own names, below the module that diffusers speaks of."""

    layout: Layout
    root: str

    def own(self, name: str) -> str | None:
        """The model's own name for what diffusers calls ``name``, or None."""
        inner = name.removeprefix("transformer.").removeprefix("unet.")
        below = f"{self.root}.{inner}" if self.root else inner
        known = (path for path in (name, below) if self.layout.has_module(path))
        return next(known, None)


def _ask(
    convert: _Convert, modules: Sizes, dialect: _Dialect, paths: _Paths
) -> dict[str, tuple[Place, ...]]:
    """The places of those of ``modules`` that are known in this dialect; none if it refuses one."""
    if not modules:
        return {}
    try:
        with _quiet():
            converted = convert(_stand_ins(modules, dialect))
    except Exception:  # Converters meet what they do not know with any error that there is.
        return {}
    return _read(converted, modules, paths)


def _ask_in_parts(
    convert: _Convert, modules: Sizes, dialect: _Dialect, paths: _Paths
) -> dict[str, tuple[Place, ...]]:
    """The same for ever smaller parts of ``modules``, so that what is refused stands alone."""
    found = _ask(convert, modules, dialect, paths)
    if found or len(modules) == 1:
        return found
    names = list(modules)
    for part in names[: len(names) // 2], names[len(names) // 2 :]:
        found |= _ask_in_parts(convert, {name: modules[name] for name in part}, dialect, paths)
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what diffusers would log of the stand-ins, in this thread, from the log."""
    logger, thread = logging.getLogger(_LOGGER), threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)


def _stand_ins(modules: Sizes, dialect: _Dialect) -> dict[str, Tensor]:
    """Both halves of each module with one column, where row ``r`` of the n-th holds n strides + r.

    In float64, which holds these numbers exactly. No number is 0, which would look like a block
    of a sparse matrix. Each alpha is the rank, so that nothing is scaled.
    """
    keys: dict[str, Tensor] = {}
    for number, (module, (rank, outputs)) in enumerate(modules.items(), start=1):
        name, start = dialect.name(module), number * _STRIDE
        keys[name + dialect.down] = torch.full((rank, 1), float(start), dtype=torch.float64)
        keys[name + dialect.up] = (torch.arange(outputs, dtype=torch.float64) + start)[:, None]
        if dialect.with_alpha:
            keys[f"{name}.alpha"] = torch.tensor(float(rank), dtype=torch.float64)
    return keys


def _read(
    converted: Mapping[str, Tensor], modules: Sizes, paths: _Paths
) -> dict[str, tuple[Place, ...]]:
    found: dict[int, list[tuple[str | None, Tensor]]] = {}
    for key, numbers in converted.items():
        split = split_key(key)
        if split is not None and split[1] == "lora_B" and numbers.numel():
            numbers = numbers.flatten().long()
            number = int(numbers[0]) // _STRIDE
            found.setdefault(number, []).append((paths.own(split[0]), numbers - number * _STRIDE))
    names = dict(enumerate(modules, start=1))
    return {
        names[number]: places
        for number, parts in found.items()
        if number in names and (places := _checked(parts, modules[names[number]][1])) is not None
    }


def _checked(parts: list[tuple[str | None, Tensor]], outputs: int) -> tuple[Place, ...] | None:
    """The places, if the model has all of them and each output goes to just one of them."""
    rows = torch.cat([rows for _, rows in parts])
    if len(rows) != outputs or not bool((torch.bincount(rows) == 1).all()):
        return None
    places = tuple(Place(path, _rows(part, outputs)) for path, part in parts if path is not None)
    return places if len(places) == len(parts) else None


def _rows(rows: Tensor, outputs: int) -> slice | Tensor | None:
    first, count = int(rows[0]), len(rows)
    if not torch.equal(rows, torch.arange(first, first + count)):
        return rows
    return None if count == outputs else slice(first, first + count)
