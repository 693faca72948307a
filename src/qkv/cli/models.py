"""`qkv pull`, `qkv list`, `qkv rm`: the models kept on this machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer import Argument, Option

from qkv.cli import terminal
from qkv.cli.bars import Bars
from qkv.errors import QkvError
from qkv.explain.charts import table

Name = Annotated[str, Argument(help="Hub id or short name.")]


def pull(name: Name, quiet: Annotated[bool, Option("--quiet", "-q", help="No progress.")] = False) -> None:
    """Fetch a model, or its newest version, and print where it is.

    \b
    qkv pull smollm2
    qkv pull Qwen/Qwen3-0.6B
    """
    from qkv.weights import names

    with Bars(quiet=quiet) as bars:
        path = names.pull(name, bars)
    terminal.write(f"{path}\n")


def list_models() -> None:
    """List the models that need no network any more."""
    from qkv.weights.names import cached_models

    models = cached_models()
    if not models:
        terminal.note("no models yet; fetch one: qkv pull smollm2")
        return
    rows = [("NAME", "SIZE", "FROM", "WHERE")]
    rows += [(model.name, terminal.bytes_text(model.size_bytes), model.kind, str(model.path)) for model in models]
    terminal.write(terminal.for_output(table(rows, left=4, rule=False)))


def rm(name: Name, yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Delete a downloaded model.

    \b
    qkv rm smollm2
    qkv rm -y Qwen/Qwen3-0.6B
    """
    from qkv.weights import names

    wanted = names.full_name(name).lower()
    model = next((model for model in names.cached_models() if model.name.lower() == wanted), None)
    if model is not None and not yes:  # of a model that is not here, `remove` says so
        if not terminal.is_terminal(sys.stdin):
            raise QkvError("rm asks before it deletes, and nobody is there to answer; -y deletes without asking")
        size = terminal.bytes_text(model.size_bytes)
        if not typer.confirm(f"delete {terminal.visible(model.name)} ({size})?", err=True):
            terminal.note("nothing deleted")
            return
    freed = names.remove(name)
    terminal.write(terminal.for_output(f"deleted {name}: {freed:,} bytes freed\n"))
