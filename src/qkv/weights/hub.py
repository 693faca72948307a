"""Models of the Hugging Face hub, through `huggingface_hub`, in its own cache: HF_HOME, HF_TOKEN and HF_HUB_OFFLINE
work as everywhere. Only the files that qkv reads are fetched.

`huggingface_hub` is imported inside the functions: it reads its environment when it is imported.
"""

from __future__ import annotations

import glob
import io
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qkv import settings
from qkv.errors import CacheError, ModelFileError, ModelNotFoundError
from qkv.model.families import FAMILIES
from qkv.progress import Progress, silent
from qkv.weights.gguf import all_parts
from qkv.weights.jsonfile import read_json
from qkv.weights.safetensors import INDEX, SINGLE

REQUEST_SECONDS = 8.0
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
ELSEWHERE = "the model smollm2 (-m smollm2) needs only a package index"


def cached(repo: str, file: str | None = None) -> Path | None:
    """The model in the hub's cache: its folder, or the one `.gguf` file; None unless all of it is there."""
    import huggingface_hub as hf

    try:
        found = hf.try_to_load_from_cache(repo, file or "config.json")
        if isinstance(found, str):
            path = Path(found)
            if file is None:
                return _whole_model(path.parent)
            return path if all(part.exists() for part in all_parts(path)) else None
        if file:
            return None
        return _whole_model(Path(hf.snapshot_download(repo, allow_patterns="*.gguf", local_files_only=True)))
    except hf.errors.LocalEntryNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _explain(_name(repo, file), error) from error


def fetch(repo: str, file: str | None = None, progress: Progress = silent) -> Path:
    """Bring the newest version into the hub's cache; returns its folder, or the `.gguf` file.

    Where the hub cannot be reached, a cached version is good enough. Otherwise raises `ModelNotFoundError`.
    """
    import huggingface_hub as hf

    name = _name(repo, file)
    if settings.offline():
        found = cached(repo, file)
        if found is None:
            raise ModelNotFoundError(
                f"{name} is not in the hub's cache, and QKV_OFFLINE or HF_HUB_OFFLINE forbids to fetch it; {ELSEWHERE}"
            )
        return found
    progress(f"asking the hub for {name}", 0, None)
    try:
        info = hf.HfApi().model_info(repo, timeout=REQUEST_SECONDS, files_metadata=True)
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
        wanted = choose_files(name, sizes, file)
        what, total = f"downloading {name}", sum(sizes[path] for path in wanted)
        patterns, bar = [glob.escape(path) for path in wanted], _bar_class(what, total, progress)
        folder = Path(hf.snapshot_download(repo, allow_patterns=patterns, tqdm_class=bar))
        progress(what, total, total)
    except (OSError, ValueError, hf.errors.HTTPError) as error:  # type: ignore[attr-defined]
        refused = isinstance(error, hf.errors.RepositoryNotFoundError)
        found = None if refused else cached(repo, file)
        if found is None:
            raise _explain(name, error) from error
        return found
    gguf = [path for path in wanted if path.endswith(".gguf")]
    return folder / gguf[0] if gguf else folder


def list_cached() -> Iterator[tuple[str, Path, int]]:
    """(hub id, folder, bytes on disk) of each cached model that qkv could load."""
    for repo in _cached_repos():
        newest = max(repo.revisions, key=lambda found: ("main" in found.refs, found.last_modified), default=None)
        if newest is not None and _is_loadable(newest.snapshot_path):
            yield repo.repo_id, newest.snapshot_path, repo.size_on_disk


def remove(repo: str) -> int:
    """Delete the repository from the hub's cache; returns the bytes freed, 0 if it is not there."""
    for found in _cached_repos():
        if found.repo_id == repo:
            try:
                shutil.rmtree(found.repo_path)
            except OSError as error:
                reason = error.strerror or error
                raise CacheError(f"{repo}: cannot be removed from the hub's cache ({reason})") from error
            return int(found.size_on_disk)
    return 0


def choose_files(name: str, files: Iterable[str], file: str | None) -> list[str]:
    """Which of a repository's files to fetch: the `.gguf` that was named, or safetensors with their texts, or the
    repository's only `.gguf`."""
    files = sorted(files)
    gguf = [path for path in files if path.endswith(".gguf")]
    if file is not None:
        parts = [part.as_posix() for part in all_parts(Path(file))]
        for part in parts:
            if part not in files:
                raise ModelNotFoundError(f"{name}: the repository has no {part}; its GGUF files: {_listed(gguf)}")
        return parts
    texts = [path for path in files if path in TEXT_FILES]
    weights = [path for path in files if path.endswith(".safetensors") and "/" not in path]
    if INDEX in files:
        return [*texts, INDEX, *(path for path in weights if path.startswith("model"))]
    if weights:
        return [*texts, *([SINGLE] if SINGLE in weights else weights)]
    if gguf and gguf == [part.as_posix() for part in all_parts(Path(gguf[0]))]:
        return gguf
    if gguf:
        raise ModelNotFoundError(f"{name} holds several GGUF files; name one as {name}/FILE: {_listed(gguf)}")
    raise ModelNotFoundError(f"{name} has neither safetensors nor GGUF files; qkv reads only these")


def _whole_model(folder: Path) -> Path | None:
    """The folder if it holds config.json and all weights, or its one `.gguf` file."""
    if (folder / "config.json").is_file():
        if (folder / INDEX).is_file():
            places = read_json(folder / INDEX).get("weight_map")
            shards = set(places.values()) if isinstance(places, dict) else set()
            return folder if all(isinstance(shard, str) and (folder / shard).is_file() for shard in shards) else None
        if any(folder.glob("*.safetensors")):
            return folder
    gguf = sorted(folder.rglob("*.gguf"))
    return gguf[0] if gguf and gguf == all_parts(gguf[0]) else None


def _is_loadable(folder: Path) -> bool:
    try:
        if next(folder.rglob("*.gguf"), None) is not None:
            return True
        return _whole_model(folder) is not None and read_json(folder / "config.json").get("model_type") in FAMILIES
    except (ModelFileError, TypeError):
        return False  # something else's damaged or odd config


def _cached_repos() -> list[Any]:
    """`huggingface_hub`'s descriptions of the models in its cache."""
    import huggingface_hub as hf

    try:
        return [repo for repo in hf.scan_cache_dir().repos if repo.repo_type == "model"]
    except hf.CacheNotFound:
        return []
    except (OSError, ValueError) as error:
        raise CacheError(f"the hub's cache cannot be read ({' '.join(str(error).split())})") from error


def _bar_class(what: str, total: int, progress: Progress) -> type:
    """A class of bars for `huggingface_hub`, which reports the bytes of them all to one `Progress`.

    Several of its bars may count the same bytes, from several threads: the largest count is what has come. The last
    byte is not reported here, but when all files are in place.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    lock, reported = threading.Lock(), [0]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            with lock:
                if self.counts_bytes and self.n > reported[0]:
                    reported[0] = int(self.n)
                    progress(what, max(0, min(reported[0], total - 1)), total)
            return shown

    return Bar


def _explain(name: str, error: Exception) -> Exception:
    """One line for what went wrong between here and the hub."""
    import huggingface_hub as hf

    reason = next(iter(str(error).splitlines()), "")[:200]
    if isinstance(error, hf.errors.GatedRepoError):
        return ModelNotFoundError(f"{name} is gated: accept its terms on the hub and set HF_TOKEN; {ELSEWHERE}")
    if isinstance(error, hf.errors.RepositoryNotFoundError):
        return ModelNotFoundError(f"the hub has no model {name}, or it is private and needs HF_TOKEN; {ELSEWHERE}")
    if isinstance(error, hf.errors.HfHubHTTPError):
        denied = error.response is not None and error.response.status_code in (401, 403)
        hint = "check HF_TOKEN" if denied else "try again later"
        return ModelNotFoundError(f"the hub refused {name} ({reason}); {hint}; {ELSEWHERE}")
    if isinstance(error, ValueError):
        return ModelNotFoundError(f"{name!r} is not a hub id: {reason}")
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return CacheError(f"{error.filename}: the hub's cache cannot be used ({error.strerror})")
    return ModelNotFoundError(
        f"{name} is not in the hub's cache, and the hub cannot be reached "
        f"({type(error).__name__}: {reason}); {ELSEWHERE}"
    )


def _name(repo: str, file: str | None) -> str:
    return f"{repo}/{file}" if file else repo


def _listed(paths: list[str]) -> str:
    return ", ".join(paths[:8]) + (", …" if len(paths) > 8 else "") if paths else "none"
