"""The `qkv` command: its verbs, and what its exit code means.

0: done. 2: something the user can put right, said in one line. 70: a defect in qkv. 130: Ctrl-C. 141: the reader of
standard output has gone.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

import qkv
from qkv.cli import bench, chat, cost, evaluate, explain, info, look, models, run, serve, terminal, verify, warmup
from qkv.errors import QkvError

DEFECT, INTERRUPTED, CLOSED = 70, 130, 141

app = typer.Typer(
    name="qkv",
    add_completion=False,
    rich_markup_mode=None,  # plain help: rich takes longer to import than everything else together
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qkv {qkv.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Run Qwen3 and its relatives on the CPU you have.

    \b
    qkv run "Why is the sky blue?"    one answer
    qkv chat                          a conversation
    qkv serve                         the same for other programs, and a page to chat on
    qkv list                          the models on this machine

    A model is a hub id (Qwen/Qwen3-0.6B), a short name (smollm2), a .gguf file or a folder. It is fetched on first
    use and kept. Each command has its own --help.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(run.run)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(verify.verify)
app.command()(models.pull)
app.command("list")(models.list_models)
app.command()(info.info)
app.command()(cost.cost)
app.command()(bench.bench)
app.command()(explain.explain)
app.command()(look.look)
app.command("eval")(evaluate.evaluate)
app.command()(models.rm)
app.command()(warmup.warmup)


def main() -> None:
    """The entry point: `sys.argv` in, exit code out, never a traceback without QKV_DEBUG=1."""
    terminal.prepare_streams()
    sys.exit(execute(sys.argv[1:]))


def execute(arguments: list[str]) -> int:
    """Run one command line and return its exit code. Errors have been printed."""
    try:
        try:
            code = _invoke(arguments)
        finally:
            terminal.write("")  # flush: an output that cannot take it is found here
        return code
    except KeyboardInterrupt:
        if terminal.is_terminal(sys.stderr):
            terminal.note("")  # the shell's prompt starts on a line of its own
        return INTERRUPTED
    except terminal.OutputClosed:
        return CLOSED
    except QkvError as error:
        terminal.print_error(str(error))
        return error.exit_code
    except MemoryError:
        terminal.print_error("not enough memory for this model and context; try a smaller one")
        return QkvError.exit_code
    except Exception as error:
        return _defect(error)


def _invoke(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("qkv", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except typer.Abort:  # the answer to a question was Ctrl-C or Ctrl-D
        raise KeyboardInterrupt from None
    except BrokenPipeError:  # typer's own help text
        terminal.discard(sys.stdout)
        raise terminal.OutputClosed from None
    except Exception as error:
        usage = _usage_message(error)
        if usage is None:
            raise
        terminal.print_error(usage)
        return QkvError.exit_code
    return 0


def _usage_message(error: Exception) -> str | None:
    """What typer says about a command line it cannot read, or None for any other exception.

    Found by its method: the class lives in `click` or inside typer, depending on typer's version.
    """
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    context = getattr(error, "ctx", None)
    path = "qkv" if context is None else context.command_path
    return f"{message().rstrip('.')}; see '{path} --help'"


def _defect(error: Exception) -> int:
    if os.environ.get("QKV_DEBUG") == "1":
        traceback.print_exc()
    else:
        terminal.print_error(
            f"{type(error).__name__}: {error}: this is a defect in qkv; run it again with QKV_DEBUG=1 to see where"
        )
    return DEFECT
