"""What whoever starts a server may decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Times are in seconds.

    api_key: what clients must send; None lets everyone in.
    host: the address the server is bound to; hosts: names by which it may be called, beside addresses and localhost.
    origins: web pages elsewhere that may use it.
    aliases: other names of the model. strict: refuse unknown model names and fields.
    max_body: bytes. max_waiting: requests that may wait.
    """

    api_key: str | None = None
    host: str = "127.0.0.1"
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    aliases: Sequence[str] = ()
    strict: bool = False
    log_prompts: bool = False
    max_body: int = 8 << 20
    max_waiting: int = 256
    body_seconds: float = 30.0
    prepare_seconds: float = 20.0
    ping_seconds: float = 5.0
    stop_seconds: float = 30.0
