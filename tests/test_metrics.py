"""The exporter says what the status says, of every manager that is still there."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from toys import toy, toy_adapter, toy_folder

from lora_slots import ArgumentError, SlotManager
from lora_slots.metrics import export
from lora_slots.tally import SWAP_SECONDS


@pytest.fixture
def registry():
    return CollectorRegistry(auto_describe=True)


def numbers(registry: CollectorRegistry) -> dict[str, float]:
    """What a Prometheus server reads, by name and labels."""
    text = generate_latest(registry).decode()
    return {
        f"{sample.name}{sorted(sample.labels.items()) or ''}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_numbers_are_those_of_the_status(registry, tmp_path):
    manager = SlotManager(toy(), max_rank=8, num_slots=2, cache_bytes=1 << 20, on_full="evict")
    export(manager, registry)
    for number in range(3):
        manager.add(f"n{number}", toy_folder(tmp_path / str(number), 4, seed=number))
    for name in ("n0", "n1", "n2", "n0", "n0"):
        manager.set_adapters(name)
    status, found = manager.status(), numbers(registry)
    assert found["lora_slots_loads_total"] == status.counts.loads == 4
    assert found["lora_slots_cache_hits_total"] == status.counts.cache_hits == 1
    assert found["lora_slots_evictions_total"] == status.counts.evictions == 2
    assert found["lora_slots_prefetched_total"] == found["lora_slots_recompiles_total"] == 0
    assert found["lora_slots_written_bytes_total"] == status.counts.nbytes > 0
    assert found["lora_slots_cache_adapters"] == 3
    assert found["lora_slots_cache_bytes"] == status.cache.nbytes > 0
    assert found["lora_slots_cache_limit_bytes"] == 1 << 20
    assert found["lora_slots_catalogue_adapters"] == 3
    assert found["lora_slots_slots[('state', 'used')]"] == 1
    assert found["lora_slots_slots[('state', 'unused')]"] == 1
    assert found["lora_slots_slots[('state', 'free')]"] == 0
    assert found["lora_slots_swap_seconds_count"] == 4
    assert found["lora_slots_swap_seconds_sum"] == pytest.approx(status.counts.seconds)
    bounds = [found[f"lora_slots_swap_seconds_bucket[('le', '{b}')]"] for b in SWAP_SECONDS]
    assert bounds == sorted(bounds)
    assert found["lora_slots_swap_seconds_bucket[('le', '+Inf')]"] == 4
    assert registry.get_sample_value("lora_slots_loads_total") == 4


def test_managers_are_told_apart_by_their_labels(registry):
    chat, code = (SlotManager(toy(), max_rank=8) for _ in range(2))
    export(chat, registry, model="chat")
    export(code, registry, model="code")
    chat.load(toy_adapter())
    found = numbers(registry)
    assert found["lora_slots_loads_total[('model', 'chat')]"] == 1
    assert found["lora_slots_loads_total[('model', 'code')]"] == 0
    third = SlotManager(toy(), max_rank=8)
    with pytest.raises(ArgumentError, match="already; tell them apart"):
        export(third, registry, model="chat")
    with pytest.raises(ArgumentError, match=r"same names, \['model'\], got \[\]"):
        export(third, registry)
    assert numbers(registry) == found


def test_a_manager_that_was_detached_or_is_gone_is_exported_no_more(registry):
    first, second = (SlotManager(toy(), max_rank=8) for _ in range(2))
    export(first, registry, model="a")
    export(second, registry, model="b")
    first.detach()
    assert "lora_slots_loads_total[('model', 'b')]" in numbers(registry)
    assert "lora_slots_loads_total[('model', 'a')]" not in numbers(registry)
    del second
    gc.collect()
    numbers(registry)
    assert numbers(registry) == {}
    assert registry._collector_to_names == {}
    export(SlotManager(toy(), max_rank=8), registry)  # and others may have its place


def test_a_place_is_free_at_once_without_being_scraped_before(registry):
    first = SlotManager(toy(), max_rank=8)
    export(first, registry, model="a")
    first.detach()
    second = SlotManager(toy(), max_rank=8)
    export(second, registry, model="a")
    second.load(toy_adapter())
    assert numbers(registry)["lora_slots_loads_total[('model', 'a')]"] == 1


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_the_package_is_imported_by_nothing_else_and_its_absence_is_explained():
    code = "import sys, lora_slots; print('prometheus_client' in sys.modules)"
    assert run(code) == "False\n"
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "try:\n    import lora_slots.metrics\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    assert "pip install 'lora_slots[metrics]'" in run(code)
