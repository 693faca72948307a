"""`qkv eval`: how well a model predicts a text, and what its formats cost in that."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from qkv.cli import options, terminal
from qkv.cli.bars import Bars
from qkv.errors import ParameterError, QkvError
from qkv.explain.charts import table

if TYPE_CHECKING:
    from qkv.engine.session import Session
    from qkv.opened import Opened
    from qkv.progress import Progress

WINDOW = 1024
STEP_ROWS = 128
"""Tokens a step: their logits are all the memory that scoring takes beside the models."""
LARGEST_FILE = 20_000_000


def evaluate(
    file: Annotated[Path, Argument(help="A UTF-8 text.", show_default=False)],
    model: options.Model = options.DEFAULT_MODEL,
    window: Annotated[
        int | None, Option(help=f"Tokens that are run together (default: {WINDOW}, or the model's maximum).")
    ] = None,
    stride: Annotated[int | None, Option(help="Tokens from one window to the next (default: half a window).")] = None,
    tokens: Annotated[int | None, Option(help="Only the text's first so many tokens.")] = None,
    compare: Annotated[
        str | None, Option(metavar="<formats>", help="Weights to compare with the first: bf16,int8,int4.")
    ] = None,
    weights: options.Weights = None,
    cache: options.Cache = "f16",
    threads: options.Threads = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure how well a model predicts a text: its perplexity, lower is better.

    \b
    qkv eval notes.txt
    qkv eval -m smollm2 --window 512 --stride 256 notes.txt
    qkv eval --compare bf16,int8,int4 notes.txt

    Perplexity is e^(-mean log-probability) of every token but the first. A text longer than the window is read in
    windows that overlap: each scores the tokens that none before it has, so each token is scored once, with at least
    window - stride tokens before it. The file is tokenized as `qkv run --raw` does it, without a chat template.

    --compare loads the model in each format and runs them side by side: the mean KL divergence of the first format's
    distributions from each other one's (in nats, over the whole vocabulary), and how often both have the same
    likeliest token. Memory is that of all the formats' weights, however long the text. tokens/s is what each model
    took for its tokens, all their logits included, without the comparing.
    """
    from qkv.engine import scoring
    from qkv.opened import label, open_model, thread_count
    from qkv.runtime.aside import aside

    formats, count = _formats(compare, weights), thread_count(threads)
    if tokens is not None and tokens < 2:
        raise ParameterError(f"--tokens must be at least 2, got {tokens}")
    text = read_text(file)
    with Bars(quiet=quiet) as bars, ExitStack() as stack:
        opened = open_model(model, bars)
        most = opened.config.max_position_embeddings
        span, step = scoring.window_and_stride(min(WINDOW, most) if window is None else window, stride, most)
        ids = opened.tokenizer.prompt(text)[:tokens]
        if len(ids) < 2:
            raise ParameterError(f"{file}: one token only; scoring needs two, to predict the second")
        sessions, known = _load_all(stack, opened, formats, cache, count, span, bars), opened.vocabulary
        results = aside(
            lambda: scoring.compare(sessions, ids, vocabulary=known, window=span, stride=step, progress=bars)
        )
    names = [wanted or " + ".join(sorted({*opened.formats(None).values()})) for wanted in formats]
    result = {
        "model": label(model),
        "file": str(file),
        "tokens": len(ids),
        "scored": len(ids) - 1,
        "window": span,
        "stride": step,
        "formats": [
            {
                "weights": name,
                "perplexity": quality.perplexity if math.isfinite(quality.perplexity) else None,
                "kl_divergence": quality.divergence,
                "same_top": quality.agreement,
                "tokens_per_second": quality.tokens_run / quality.seconds,
            }
            for name, quality in zip(names, results, strict=True)
        ],
    }
    terminal.write(json.dumps(result) + "\n" if as_json else terminal.for_output(as_text(result)))


def read_text(file: Path) -> str:
    """The text of a file. Raises QkvError for what is not a text."""
    try:
        with file.open("rb") as opened:
            data = opened.read(LARGEST_FILE + 1)
    except OSError as error:
        raise QkvError(f"{file}: {(error.strerror or 'cannot be read').lower()}") from None
    if len(data) > LARGEST_FILE:
        raise QkvError(f"{file}: larger than {terminal.bytes_text(LARGEST_FILE)}; give a part of it")
    text = options.utf8(data, str(file))
    if "\0" in text:
        raise QkvError(f"{file}: not a text: it has null bytes")
    if not text.strip():
        raise QkvError(f"{file}: empty, there is no text in it")
    return text


def _formats(compare: str | None, weights: str | None) -> list[str | None]:
    """The formats to load; None is the model's own."""
    from qkv.weights.choices import check_format

    if compare is None:
        check_format(weights)
        return [weights]
    if weights is not None:
        raise ParameterError("--weights is one format and --compare several: give one of the two")
    names: list[str | None] = [name.strip() for name in compare.split(",")]
    for name in names:
        check_format(name)
    if len(set(names)) < len(names) or len(names) < 2:
        raise ParameterError(f"--compare needs two or more different formats, such as bf16,int8; got {compare!r}")
    return names


def _load_all(
    stack: ExitStack,
    opened: Opened,
    formats: Sequence[str | None],
    cache: str,
    threads: int,
    window: int,
    progress: Progress,
) -> list[Session]:
    """The model in each format; the stack closes them. Raises QkvError when they do not fit into the memory."""
    from qkv.engine.session import Session
    from qkv.model.compiled import CompiledDecoder
    from qkv.runtime.memory import free_memory
    from qkv.weights.choices import packed_size

    tensors = opened.checkpoint.tensors
    needed, free = sum(packed_size(opened.config, tensors, wanted) for wanted in formats), free_memory()
    if len(formats) > 1 and free is not None and needed > free:
        raise QkvError(
            f"--compare: the weights in {len(formats)} formats need {terminal.bytes_text(needed)} and "
            f"{terminal.bytes_text(free)} are free; compare fewer at a time"
        )
    sessions = []
    for wanted in formats:
        weights = opened.load(wanted, threads=threads, progress=progress).weights
        decoder = CompiledDecoder(
            opened.config, weights, cache=cache, context=window, threads=threads, outputs=STEP_ROWS, progress=progress
        )
        stack.callback(decoder.close)
        sessions.append(Session(decoder))
    return sessions


def as_text(result: dict[str, Any]) -> str:
    """A table, and a line about how."""
    first, *others = result["formats"]
    rows = [["weights", "perplexity", f"KL({first['weights']}‖·)", "same top token", "tokens/s"]]
    for one in (first, *others):
        perplexity = "inf" if one["perplexity"] is None else f"{one['perplexity']:,.4f}"
        compared = ["", ""] if one is first else [f"{one['kl_divergence']:.6f}", f"{one['same_top']:.2%}"]
        rows.append([one["weights"], perplexity, *compared, f"{one['tokens_per_second']:,.0f}"])
    if not others:
        rows = [[*row[:2], row[-1]] for row in rows]
    overlap = f", stride {result['stride']:,}" if result["tokens"] > result["window"] else ""
    how = f"{result['scored']:,} of {result['tokens']:,} tokens scored, window {result['window']:,}{overlap}"
    return table(rows) + f"{result['model']}, {result['file']}: {how}\n"
