"""The models of lora_server.py, and their one forward: to the next token of each row."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel


class NextToken(nn.Module):
    """The likeliest next token of every row. A row's padding follows its tokens, unseen by them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Use the parts of ``model``."""
        super().__init__()
        self.decoder, self.head = model.base_model, model.get_output_embeddings()

    def forward(self, tokens: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and tokens, ``[rows]`` each.

        Args:
            tokens: ``[rows, window]`` int64.
            last: ``[rows]`` int64, the place of the last token of each row.
        """
        hidden = self.decoder(input_ids=tokens, use_cache=False).last_hidden_state
        logits = self.head(hidden[torch.arange(len(last), device=last.device), last])
        logprobs, best = logits.log_softmax(-1).max(-1)
        return logprobs, best


def load_model(name: str) -> PreTrainedModel:
    """A causal language model, float32 and in eval mode.

    Args:
        name: ``"tiny"`` for a small Llama with random weights, always the same ones; ``"smollm2"``
            for that of the other examples; or a folder or hub id of transformers.
    """
    if name == "tiny":
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
        # Large weights, so that logits are far apart, as those of a trained model are.
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.3))
    elif name == "smollm2":
        from smollm2 import load_smollm2

        model, _ = load_smollm2()
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model.eval()
