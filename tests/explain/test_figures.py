"""Plots as files: complete PNGs or nothing, and one clear line where matplotlib is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from qkv.errors import QkvError
from qkv.explain import attention_cost, convex, figures, heads, mask, model_scaling, scaling
from qkv.explain.attention_cost import AttentionCost, Phase
from qkv.explain.trace import Traced
from qkv.model.config import PRESETS
from qkv.model.cost import Limits
from tiny import random_tensors, tiny_config

QWEN3 = PRESETS["Qwen/Qwen3-0.6B"]


def scaling_of_a_model():
    config = tiny_config()
    return model_scaling.compute(Traced(config, random_tensors(config)).trace(range(20)))


def made_up_cost():
    phase = Phase("prefill", [1, 10], [1, 100], [1, 60], [1, 2], [1e-3, 1e-1])
    return AttentionCost(QWEN3, 2, Limits(1e9, 1e9, 1e9), phase, phase)


DRAWINGS = {
    "scaling": lambda figure: scaling.draw(scaling.compute((16, 32)), "a", figure),
    "model": lambda figure: model_scaling.draw(scaling_of_a_model(), "a", figure),
    "mask": lambda figure: mask.draw(mask.compute(*mask.random_heads()), "a", figure),
    "convex": lambda figure: convex.draw(convex.compute(*convex.random_heads()), "a", figure),
    "heads": lambda figure: heads.draw(heads.compute(QWEN3), "a", figure),
    "cost": lambda figure: attention_cost.draw(made_up_cost(), "a", figure),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_drawing_becomes_a_png(name, tmp_path):
    pytest.importorskip("matplotlib")
    figure, path = figures.new_figure(), tmp_path / "plot.png"
    figure.set_size_inches(13, 7)
    DRAWINGS[name](figure)
    assert all(axes.has_data() or not axes.axison for axes in figure.axes)
    figures.save(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [file.name for file in tmp_path.iterdir()] == ["plot.png"]


@pytest.mark.parametrize(
    ("fault", "raised", "message"),
    [
        (OSError(28, "No space left on device"), QkvError, r"plot\.png cannot be written: No space left on device"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
)
def test_a_failed_write_leaves_the_old_file(tmp_path, fault, raised, message):
    path = tmp_path / "plot.png"
    path.write_bytes(b"old")

    class Broken:
        def savefig(self, file, **options):
            file.write(b"half")
            raise fault

    with pytest.raises(raised, match=message):
        figures.save(Broken(), path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["plot.png"]


def test_targets_are_checked_before_anything_is_computed(tmp_path):
    figures.check_target(tmp_path / "plot.png")
    with pytest.raises(QkvError, match="is a folder; name a file"):
        figures.check_target(tmp_path)
    with pytest.raises(QkvError, match="no such folder"):
        figures.check_target(tmp_path / "missing" / "plot.png")


def test_without_matplotlib_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from qkv.errors import QkvError\nfrom qkv.explain.figures import new_figure\n"
        "try: new_figure()\nexcept QkvError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "a PNG needs matplotlib, which is not installed: pip install 'qkv[plots]'\n"
