"""Train the small LoRA adapters in ``adapters/``, each a style that one sentence shows.

    python examples/train_adapters.py              # all of them
    python examples/train_adapters.py pirate json  # only these

Each style has a file in ``texts/``: a prompt, a response in that style, a blank line, and so on.
The loss counts the response alone. Between them the adapters have four ranks, three sets of target
modules, rsLoRA, per-module patterns and two dtypes, as files from many authors do. One adapter
takes about two minutes on two CPU cores.
"""

import argparse
import json
import math
import random
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from smollm2 import MODEL_ID, answer, encode_chat, load_smollm2
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
PROMPT = "What is the sea?"  # in no training text
IGNORED = -100  # the label that transformers' loss leaves out

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """How one adapter is built and trained; the fields up to `alpha_pattern` are PEFT's."""

    r: int
    lora_alpha: int
    target_modules: tuple[str, ...]
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.float16
    learning_rate: float = 2e-3
    epochs: int = 6


RECIPES = {
    "pirate": Recipe(r=4, lora_alpha=8, target_modules=ALL_LINEAR),
    "bard": Recipe(
        r=8,
        lora_alpha=16,
        target_modules=ALL_LINEAR,
        rank_pattern={"down_proj": 4, r"layers\.[0-4]\.mlp\.(gate|up)_proj": 2},
        alpha_pattern={"down_proj": 12, r"self_attn\.v_proj": 4},
        learning_rate=1e-3,
    ),
    "json": Recipe(r=16, lora_alpha=24, target_modules=ATTENTION, dtype=torch.bfloat16, epochs=8),
    "robot": Recipe(r=32, lora_alpha=8, target_modules=("q_proj", "v_proj"), use_rslora=True),
}


def read_texts(path: Path) -> list[tuple[str, str]]:
    """Read pairs of prompt and response: two lines each, a blank line between pairs."""
    blocks = path.read_text(encoding="utf-8").strip().split("\n\n")
    return [(prompt, response) for prompt, response in (block.split("\n") for block in blocks)]


def tokenize(
    tokenizer: PreTrainedTokenizerBase, prompt: str, response: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the token ids of a chat and its labels, which are `IGNORED` over the prompt.

    Returns:
        Both int64, ``[tokens]``.
    """
    start = encode_chat(tokenizer, prompt)[0]
    end = tokenizer(response + tokenizer.eos_token, return_tensors="pt")["input_ids"][0]
    return torch.cat([start, end]), torch.cat([torch.full_like(start, IGNORED), end])


def train(
    model: PeftModel,
    examples: list[tuple[torch.Tensor, torch.Tensor]],
    recipe: Recipe,
    batch_size: int = 4,
    seed: int = 0,
    title: str = "",
) -> float:
    """Train the adapter of `model` in place.

    Returns:
        The mean loss of the last epoch.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    steps = recipe.epochs * math.ceil(len(examples) / batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=steps, pct_start=0.1
    )
    shuffler = random.Random(seed)
    mean = math.nan
    with tqdm(total=steps, desc=title, unit="step") as bar:
        for _ in range(recipe.epochs):
            order = shuffler.sample(examples, len(examples))
            losses = []
            for first in range(0, len(order), batch_size):
                ids, labels = zip(*order[first : first + batch_size], strict=True)
                input_ids = pad_sequence(list(ids), batch_first=True)
                output = model(
                    input_ids=input_ids,
                    labels=pad_sequence(list(labels), batch_first=True, padding_value=IGNORED),
                )
                output.loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                losses.append(output.loss.item())
                bar.update()
            mean = sum(losses) / len(losses)
            bar.set_postfix(loss=f"{mean:.3f}")
    return mean


def save(model: PeftModel, folder: Path, dtype: torch.dtype) -> None:
    """Save the adapter as PEFT does, with its tensors in `dtype` and without a model card."""
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    weights = folder / "adapter_model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    config_file = folder / "adapter_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["target_modules"].sort()  # a set in PEFT: the order would change from run to run
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def make_adapter(
    name: str,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    seed: int = 0,
) -> None:
    """Train one adapter, save it into `folder` and print a sample; `base` is left as it was."""
    recipe = RECIPES[name]
    torch.manual_seed(seed)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=MODEL_ID,
        r=recipe.r,
        lora_alpha=recipe.lora_alpha,
        target_modules=list(recipe.target_modules),
        use_rslora=recipe.use_rslora,
        rank_pattern=recipe.rank_pattern,
        alpha_pattern=recipe.alpha_pattern,
    )
    model = get_peft_model(base, config)
    texts = read_texts(HERE / "texts" / f"{name}.txt")
    examples = [tokenize(tokenizer, *pair) for pair in texts]
    loss = train(model, examples, recipe, seed=seed, title=name)
    save(model, folder, recipe.dtype)
    model.unload()

    saved = PeftModel.from_pretrained(base, folder)
    tqdm.write(f"{name}: loss {loss:.3f}; {PROMPT} -> {answer(saved, tokenizer, PROMPT)}")
    saved.unload()


def main() -> None:
    """Train the adapters named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description="Train the example LoRA adapters.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--output", type=Path, default=HERE / "adapters", help="where they go")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(RECIPES):
        parser.error(f"NAME must be one of {', '.join(RECIPES)} (got {', '.join(sorted(unknown))})")
    # PEFT still reads a property that transformers has renamed.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    base, tokenizer = load_smollm2()
    for name in arguments.names or RECIPES:
        make_adapter(name, base, tokenizer, arguments.output / name)


if __name__ == "__main__":
    main()
