from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before anything imports huggingface_hub: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

# The models are tiny: a second thread only waits for the first.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No test sees another's compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
