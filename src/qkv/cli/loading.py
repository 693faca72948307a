"""How the verbs get a model. Tests put a scripted one in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qkv.cli.bars import Bars

if TYPE_CHECKING:
    from qkv.llm import LLM

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"


def load_llm(
    model: str,
    *,
    context: int | None,
    weights: str | None,
    cache: str,
    cache_bytes: int | None,
    speculation: bool,
    threads: int | None,
    quiet: bool,
) -> LLM:
    """Open a model, fetching it first when it is not here, with progress bars unless `quiet`."""
    from qkv.llm import LLM

    with Bars(quiet=quiet) as bars:
        return LLM(
            model,
            context=context,
            weights=weights,
            cache=cache,
            cache_bytes=cache_bytes,
            speculation="prompt" if speculation else None,
            threads=threads,
            progress=bars,
        )
