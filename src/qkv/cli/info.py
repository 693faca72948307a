"""`qkv info`: what a model is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Argument

from qkv.cli import terminal
from qkv.explain.charts import table

if TYPE_CHECKING:
    from qkv.model.config import ModelConfig
    from qkv.opened import Opened
    from qkv.weights.report import Amount, LoadReport

Rows = list[tuple[str, ...]]


def info(name: Annotated[str, Argument(help="Hub id, short name, .gguf file or folder.")]) -> None:
    """Show a model's shape, files and sizes. Never fetches anything.

    \b
    qkv info smollm2
    qkv info Qwen/Qwen3-0.6B
    qkv info ./model.gguf
    """
    from qkv.opened import known_model
    from qkv.weights import names

    known = known_model(name)
    rows = [("model", known.label), *shape_rows(known.config)]
    if known.files is None:
        fetch = f"not downloaded; fetch them: qkv pull {known.label}"
        rows.append(("weights", "none in this folder" if names.is_local(name) else fetch))
    else:
        rows += _file_rows(known.files)
    terminal.write(terminal.for_output(table(rows, left=2, rule=False)))


def shape_rows(config: ModelConfig) -> Rows:
    """The lines that the config alone decides."""
    from qkv.model.cost import cache_bytes_per_position

    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    kv_bytes = round(cache_bytes_per_position(config, "f16"))
    context = config.max_position_embeddings
    return [
        ("architecture", config.architecture),
        ("parameters", f"{config.parameter_count:,}"),
        ("layers", f"{config.num_hidden_layers}"),
        ("hidden size", f"{config.hidden_size:,}"),
        ("MLP size", f"{config.intermediate_size:,}"),
        ("query heads", f"H = {heads}, head_dim = {head_dim}, so H x head_dim = {heads * head_dim:,}"),
        ("key/value heads", f"H_kv = {kv_heads}, each read by {config.heads_per_kv_head} query heads"),
        ("vocabulary", f"{config.vocab_size:,} rows, {'tied' if config.tie_word_embeddings else 'separate'} output"),
        ("RoPE theta", f"{config.rope_theta:,.0f}"),
        *([("RoPE scaling", str(config.rope_scaling))] if config.rope_scaling else []),
        ("context", f"{context:,} positions"),
        ("KV cache (f16)", f"{kv_bytes:,} bytes a token, {terminal.bytes_text(kv_bytes * context)} for the context"),
    ]


def _file_rows(files: Opened) -> Rows:
    from qkv.weights.report import stored_amounts

    checkpoint = files.checkpoint
    amounts = stored_amounts(checkpoint.tensors.values())
    return [
        *(("weights", _amount(amount, "tensor", "tensors")) for amount in amounts),
        ("tokenizer", "none" if checkpoint.tokenizer is None else f"{files.tokenizer.vocab_size:,} tokens"),
        ("chat template", "no" if checkpoint.chat_template is None else "yes"),
        ("end tokens", ", ".join(map(str, files.end_ids)) or "none"),
        ("path", str(checkpoint.path)),
        *(("note", text) for text in checkpoint.notes),
    ]


def report_text(report: LoadReport) -> str:
    """What loading did, for people."""
    rows = [
        ("loaded", f"{report.path} in {report.seconds:.2f} s"),
        *(("in the files", _amount(amount, "tensor", "tensors")) for amount in report.stored),
        *(("in memory", _amount(amount, "matrix", "matrices")) for amount in report.packed),
        *(("requantized", text) for text in report.requantized or ("nothing: all numbers are the files' own",)),
        *(("note", text) for text in report.notes),
    ]
    return table(rows, left=2, rule=False)


def _amount(amount: Amount, thing: str, things: str) -> str:
    """`BF16: 1.2 GB in 197 tensors`."""
    count = f"{amount.count:,} {thing if amount.count == 1 else things}"
    return f"{amount.format}: {terminal.bytes_text(amount.bytes)} in {count}"
