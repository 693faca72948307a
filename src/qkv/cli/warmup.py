"""`qkv warmup`: compile the kernels ahead of time."""

from __future__ import annotations

from qkv.cli import options, terminal
from qkv.cli.bars import Bars


def warmup(
    model: options.Model = options.DEFAULT_MODEL,
    weights: options.Weights = None,
    quiet: options.Quiet = False,
) -> None:
    """Compile the kernels a model needs, once for this processor.

    \b
    qkv warmup
    qkv warmup -m smollm2
    qkv warmup -m Qwen/Qwen3-0.6B --weights int4

    The first run of a model does the same. Nothing is fetched: a Qwen3 that is not on this machine yet gets the kernels
    for its checkpoint (int8, unless --weights says otherwise); of other models the files say what they need.
    """
    from qkv.model.compiled import compile_kernels
    from qkv.opened import known_model
    from qkv.weights.choices import check_format

    check_format(weights)
    files = known_model(model).files
    formats = frozenset(files.formats(weights).values() if files else {weights or "int8"})
    with Bars(quiet=quiet) as bars:
        compile_kernels(formats, bars)
    if not quiet:
        terminal.note(f"kernels are ready for {model} ({', '.join(sorted(formats))})")
