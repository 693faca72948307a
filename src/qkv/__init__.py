"""qkv runs Qwen3 and the decoders around it on the CPU, and lets any attention head be opened and looked at.

    from qkv import LLM, SamplingParams

    with LLM("Qwen/Qwen3-0.6B") as llm:
        print(llm.chat([{"role": "user", "content": "What is a key, what is a value?"}]).text)

Importing qkv imports nothing heavy: the names below are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkv.engine.params import SamplingParams
    from qkv.engine.scoring import Score
    from qkv.errors import QkvError
    from qkv.llm import LLM, Chunk, Completion
    from qkv.look.look import Look

__version__ = "0.1.0"
__all__ = ["LLM", "Chunk", "Completion", "Look", "QkvError", "SamplingParams", "Score", "__version__"]

_HOMES = {
    "LLM": "qkv.llm",
    "Chunk": "qkv.llm",
    "Completion": "qkv.llm",
    "Look": "qkv.look.look",
    "Score": "qkv.engine.scoring",
    "SamplingParams": "qkv.engine.params",
    "QkvError": "qkv.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qkv' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
