"""The example of a pipeline runs as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import styles
from PIL import Image

pytestmark = pytest.mark.slow


def test_the_styles_example_shows_right_pictures_and_no_recompile(tmp_path: Path) -> None:
    path = tmp_path / "grid" / "styles.png"
    with styles.console.capture() as capture:
        rows = styles.main(output=path)
    assert [row.name for row in rows] == ["(none)", *styles.STYLES, "(unloaded)"]
    assert [row.graphs for row in rows] == [0] * 7
    assert all(row.difference < 1e-4 for row in rows)
    assert all(row.effect > 0.1 for row in rows[1:-1])
    assert rows[-1].difference == 0
    assert [row.rank for row in rows[1:-1]] == ["4", "8", "32", "6", "12"]
    assert {row.components for row in rows[1:-1]} == {
        "unet",
        "text_encoder",
        "unet, text_encoder",
    }
    assert all(name in capture.get() for name in styles.STYLES)
    with Image.open(path) as grid:
        colours = grid.convert("RGB").getcolors(maxcolors=2**24)
        assert grid.size == (2 * styles.SIZE * 6, (2 * styles.SIZE + 14) * 2)
    assert len(colours) > 1000
