"""The machine code of the step: what it must be free of. What it computes is in test_compiled.py."""

from __future__ import annotations

import numpy as np
import pytest

from purity import assert_pure
from qkv.kernels import packing
from qkv.kernels.sizes import FORMATS
from qkv.model import compiled
from qkv.model.forward import step_for
from qkv.runtime import spmd
from qkv.runtime.team import Program


def arguments(formats, monkeypatch):
    """What the warm-up compiles the step of these formats for."""
    programs = []
    with monkeypatch.context() as patch:
        patch.setattr(Program, "compile", lambda program: programs.append(program))
        patch.setattr(packing, "compile_all", lambda: None)
        compiled.warm(sorted(formats))
    (program,) = programs
    return 0, 1, np.zeros(spmd.sync_size(1), np.int64), *program.arrays


@pytest.mark.slow
def test_the_step_cannot_raise_and_counts_no_references(monkeypatch):
    """With all formats in one step: an exception in one thread would leave the others waiting at a barrier."""
    assert_pure(step_for(frozenset(FORMATS)), *arguments(FORMATS, monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_step_of_one_format_is_pure_too(fmt, monkeypatch):
    assert_pure(step_for(frozenset({fmt})), *arguments([fmt], monkeypatch))
