"""The environment variables that more than one room reads. (`QKV_MODEL` and `QKV_DEBUG` are the command line's own.)"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """Where models and compiled kernels are kept: `QKV_CACHE`, else the platform's cache folder + `qkv`."""
    chosen = os.environ.get("QKV_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "qkv"


def offline() -> bool:
    """Whether the network is off limits: `QKV_OFFLINE` or Hugging Face's own `HF_HUB_OFFLINE` set to a true value."""
    truth = {"1", "true", "yes", "on"}
    return any(os.environ.get(name, "").lower() in truth for name in ("QKV_OFFLINE", "HF_HUB_OFFLINE"))
