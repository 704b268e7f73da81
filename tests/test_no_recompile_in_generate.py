"""Promise 3 in transformers' ``generate`` with a static cache: two graphs, for any adapters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from toys import TINY, TOKENS, write_adapter
from transformers import LlamaForCausalLM

from lora_slots import SlotManager

ADAPTERS = {
    "one layer kind": {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]},
    "two layer kinds": {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "up_proj"]},
    "all layers": {"r": 8, "lora_alpha": -4, "target_modules": "all-linear"},
}


@pytest.mark.parametrize("compiled_as", ["forward", "model"])
def test_generate_compiles_prompt_and_token_once_for_all_adapters(tmp_path, compiled_as):
    llama = TINY["llama"]
    model, reference = llama.build(), llama.build()
    manager = SlotManager(model, max_rank=8)
    eager = SlotManager(reference, max_rank=8)
    counter = CompileCounterWithBackend("eager")
    if compiled_as == "forward":
        model.forward = torch.compile(model.forward, backend=counter, fullgraph=True)
    else:
        model.compile(backend=counter, fullgraph=True)
    texts = [generate(model)[0].tolist()]
    assert counter.frame_count == 2
    for name, config in ADAPTERS.items():
        folder = write_adapter(tmp_path / name, llama.build(), **config)
        for each in (manager, eager):
            each.load(folder)
        with manager.no_recompile():
            text, logits = generate(model)
        expected_text, expected_logits = generate(reference)
        assert torch.equal(text, expected_text)
        torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-6)
        texts.append(text.tolist())
    manager.unload("default")
    assert generate(model)[0].tolist() == texts[0]
    assert counter.frame_count == 2
    assert all(texts.count(text) == 1 for text in texts)


def test_twin_a_growing_cache_compiles_again():
    config = TINY["llama"].build().config
    config.num_hidden_layers = 1
    model = LlamaForCausalLM(config).eval()
    SlotManager(model, max_rank=8)
    counter = CompileCounterWithBackend("eager")
    model.compile(backend=counter, dynamic=False)
    generate(model, cache_implementation="dynamic")
    assert counter.frame_count > 2


@torch.no_grad()
def generate(model: nn.Module, cache_implementation: str = "static") -> tuple[Tensor, Tensor]:
    """The token ids ``[batch, tokens]`` and the logits of every new one."""
    output = model.generate(
        TOKENS,
        attention_mask=torch.ones_like(TOKENS),
        max_new_tokens=3,
        do_sample=False,
        cache_implementation=cache_implementation,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences, torch.stack(output.logits)
