"""The tables of what loads, in the documentation and in the README, say what code and tests do."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lora_slots import SlotManager, read_adapter
from lora_slots.layers import KINDS
from lora_slots.reading.folders import WEIGHT_NAMES
from lora_slots.reading.formats import FAMILIES, FOREIGN
from lora_slots.resolve.converting import _LOADERS
from lora_slots.resolve.settings import _FEATURES, WHOLE_TENSOR_KEYS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "formats.md").read_text()
README = (ROOT / "README.md").read_text()
NAME, OPTION, TESTS = "Format or variant", "Option needed", "Tested by"
# Arguments of SlotManager that are no room for a variant: what it is given, and sizes.
SIZES = {
    "self", "model", "max_rank", "num_slots", "target_modules", "dtype", "rank_buckets",
    "cache_bytes", "rank_budget", "on_full", "routing",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    name: str
    example: str
    option: str
    tests: tuple[str, ...]


def table(text: str) -> list[Row]:
    """The rows of the one table in ``text`` whose first column is `NAME`."""
    (lines,) = re.findall(rf"^\| {NAME} \|.*\n\|[-|]+\n(?:\|.*\n)+", text, re.MULTILINE)
    header, _, *rows = ([c.strip() for c in line[2:-2].split(" | ")] for line in lines.splitlines())
    found = [dict(zip(header, cells, strict=True)) for cells in rows]
    return [
        Row(r[NAME], r.get("Example", ""), r[OPTION], tuple(re.findall(r"`([^`]*)`", r[TESTS])))
        for r in found
    ]


DOCUMENTED, SHORT = table(PAGE), table(README)


def whole_words(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-]){re.escape(words)}(?![\w-])")


def test_every_row_names_test_files_that_exist_and_hold_tests() -> None:
    for row in (*DOCUMENTED, *SHORT):
        assert row.tests, row.name
        for name in row.tests:
            path = ROOT / "tests" / name
            assert path.is_file(), f"{row.name}: {name}"
            functions = [
                n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)
            ]
            assert any(n.name.startswith("test_") for n in functions), name


@pytest.mark.slow
def test_the_files_that_are_named_can_be_collected(request: pytest.FixtureRequest) -> None:
    collected = {item.path.name for item in request.session.items}
    named = {name for row in (*DOCUMENTED, *SHORT) for name in row.tests}
    # In a run of the whole suite, that is known already.
    missing = sorted(str(ROOT / "tests" / name) for name in named - collected)
    if not missing:
        return
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *missing]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:]
    for path in missing:
        assert f"{Path(path).name}::test_" in run.stdout


def test_the_readmes_table_is_part_of_the_documented_one() -> None:
    documented = {row.name: row for row in DOCUMENTED}
    assert len(documented) == len(DOCUMENTED)
    assert 0 < len(SHORT) < len(DOCUMENTED)
    for row in SHORT:
        assert row.option == documented[row.name].option
        assert set(row.tests) <= set(documented[row.name].tests)


@pytest.mark.parametrize("rows", [DOCUMENTED, SHORT], ids=["docs", "README"])
def test_every_family_of_files_has_a_row(rows: list[Row]) -> None:
    names = {row.name for row in rows}
    assert {family.name for family in FAMILIES} <= names
    # The twin: a family that no row names would be found.
    assert not {"another family"} <= names


def test_every_algorithm_and_feature_that_is_refused_is_named() -> None:
    refused = " ".join(row.example for row in DOCUMENTED if row.name.startswith("Refused"))
    for name in {*FOREIGN.values(), *_FEATURES.values()}:
        assert whole_words(name).search(refused), name
    for name in ("PiSSA", "OLoRA", "CorDA", "LoftQ", "LoRA-GA"):
        assert name in refused


@pytest.mark.parametrize("rows", [DOCUMENTED, SHORT], ids=["docs", "README"])
def test_every_option_that_makes_room_for_a_variant_is_in_the_table(rows: list[Row]) -> None:
    options = inspect.signature(SlotManager.__init__).parameters.keys() - SIZES
    assert options == {"dora", "bias", "full_modules", "token_rows"}
    shown = [row.option for row in rows]
    for option in options:
        assert any(f"`{option}=" in text for text in shown), option
    for call, function in (("load", SlotManager.load), ("read_adapter", read_adapter)):
        for option in re.findall(rf"`{call}\(path, (\w+)=", " ".join(shown)):
            assert option in inspect.signature(function).parameters
    assert any("compress_to=" in text for text in shown)
    assert any("allow_pickle=" in text for text in shown)


@pytest.mark.parametrize("rows", [DOCUMENTED, SHORT], ids=["docs", "README"])
def test_every_kind_of_layer_and_of_whole_tensor_has_a_row(rows: list[Row]) -> None:
    names = " ".join(row.name for row in rows)
    for kind in KINDS:
        assert whole_words(kind.name).search(names), kind.name
    for key in (*WHOLE_TENSOR_KEYS, "trainable_token_indices", "target_parameters", "lora_bias"):
        assert key in names


def test_every_class_that_diffusers_is_asked_about_and_every_file_name_is_on_the_page() -> None:
    for name in (*_LOADERS, *WEIGHT_NAMES):
        assert f"`{name}`" in PAGE, name


def test_every_call_that_the_tables_show_has_its_arguments() -> None:
    for row in (*DOCUMENTED, *SHORT):
        for option in re.findall(r"`(\w+)=", row.option):
            assert option in inspect.signature(SlotManager.__init__).parameters, row.name


def test_the_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in navigation
