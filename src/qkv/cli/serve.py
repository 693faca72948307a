"""`qkv serve`: the model behind an HTTP address, for OpenAI's and Anthropic's clients and for a browser."""

from __future__ import annotations

import ipaddress
import json
import logging
import shlex
import socket
import sys
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli import options, terminal
from qkv.errors import QkvError

if TYPE_CHECKING:
    from qkv.llm import LLM
    from qkv.server.settings import Settings

KEY_VARIABLE = "QKV_API_KEY"


@options.grouped
def serve(
    model: options.ModelOptions,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar=KEY_VARIABLE, show_envvar=True, help="Key that clients have to send."),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="<name>", help="Another name of the model; may be given again."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse unknown model names and unknown fields.")] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option("--allow-origin", metavar="<url>", help="A web page elsewhere that may use this server."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="<name>", help="A name by which it is reached, such as a proxy's."),
    ] = None,
    stop_seconds: Annotated[
        float, typer.Option("--stop-seconds", min=0, help="How long running answers may take when it is stopped.")
    ] = 30,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Show prompts in the log.")] = False,
) -> None:
    """Serve a model over HTTP until Ctrl-C or SIGTERM.

    \b
    qkv serve -m smollm2
    QKV_API_KEY=secret qkv serve --host 0.0.0.0 --port 8080

    It speaks the interfaces of OpenAI (/v1/chat/completions, /v1/completions, /v1/responses) and Anthropic
    (/v1/messages), and has a page to chat on at /. Needs the extra "server": pip install ".[server]".
    """
    _check_installed()
    from qkv.server.settings import Settings

    settings = Settings(
        api_key=api_key or None,
        host=host,
        hosts=allow_host or (),
        origins=allow_origin or (),
        aliases=alias or (),
        strict=strict,
        log_prompts=log_prompts,
        stop_seconds=stop_seconds,
    )
    with _listen(host, port) as listener, model.open() as llm:
        if not _is_local(host) and not settings.api_key:
            terminal.note(
                f"qkv: warning: anyone who reaches {host} can use this server; set --api-key or {KEY_VARIABLE}"
            )
        logging.basicConfig(
            level=logging.WARNING if model.quiet else logging.INFO, format="%(message)s", stream=sys.stderr
        )
        run(llm, settings, listener, quiet=model.quiet)


def run(llm: LLM, settings: Settings, listener: socket.socket, *, quiet: bool = False) -> None:
    """Serve on an open socket until SIGTERM or Ctrl-C; running answers are finished, or ended when their time is up."""
    import uvicorn

    from qkv.server.app import create_app
    from qkv.server.connection import protocol

    app = create_app(llm, settings)
    config = uvicorn.Config(
        app,
        http=protocol(settings.body_seconds),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.stop_seconds) + 5,
    )
    answerer = app.state.service.answerer

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if not quiet:
                terminal.note(_greeting(llm, app.state.service.id, settings, listener))

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            answerer.stop()
            await super().shutdown(sockets)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            # Unlike uvicorn's own, it does not raise the signal again afterwards: being stopped is no failure.
            self.should_exit, self.force_exit = True, self.should_exit

    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Take the address before the model is loaded, which takes longer."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        return listener
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise QkvError(f"--host {host} --port {port}: cannot listen there: {reason}; choose others") from None


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _greeting(llm: LLM, name: str, settings: Settings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    report = llm.load_report
    packed = ", ".join(sorted({amount.format for amount in report.packed}))
    blocks = llm.cache_stats.blocks
    key = ' -H "Authorization: Bearer $QKV_API_KEY"' if settings.api_key else ""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]}, ensure_ascii=False)
    return "\n".join(
        [
            f"{name} ({packed}), context {llm.context:,}, cache {llm.cache} for {32 * blocks:,} tokens",
            f"chat on {url}/, clients use {url}/v1, Ctrl-C ends it",
            f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        ]
    )


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise QkvError(f'qkv serve needs {error.name}: pip install ".[server]"') from None
