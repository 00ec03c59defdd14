"""Compiles the kernels with numba and keeps the machine code, in one folder for each state of the sources.

numba's own cache looks at the file of the function alone. A kernel contains the code of its helpers in other
files, so the folder is named by a hash over all kernel sources and the versions of what compiles them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
import numpy as np
from numba.core import config
from numba.misc.appdirs import AppDirs

log = logging.getLogger(__name__)

_HOST = Path(__file__).parent
_KERNELS = _HOST.parent
# numba reads CACHE_DIR, which is one for all threads, several times: changed between, code lands in the current folder.
_LOCK = threading.RLock()

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(signature: Any = None, **options: Any) -> Callable[[Function], Function]:
    """Returns a decorator that compiles a function without the interpreter's lock.

    With a signature it is compiled, or loaded from disk, at once. Without one it becomes part of its callers.
    """

    def decorate(function: Function) -> Function:
        with _kept(signature is not None) as is_kept:
            compile_it = numba.njit(signature, nogil=True, error_model="numpy", cache=is_kept, **options)
            return cast(Function, compile_it(function))

    return decorate


def c_function(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator that compiles a function, or loads it from disk, for callers in C: it is at its `address`."""

    def decorate(function: Callable[..., Any]) -> Any:
        with _kept(True) as is_kept:
            return numba.cfunc(signature, nopython=True, error_model="numpy", cache=is_kept)(function)

    return decorate


@contextlib.contextmanager
def _kept(is_asked: bool) -> Iterator[bool]:
    """What numba compiles within is kept on disk where that is asked and possible; yields whether it is."""
    with _LOCK:
        folder = _cache_folder() if is_asked else None
        configured = config.CACHE_DIR
        config.CACHE_DIR = str(folder or configured)
        try:
            yield folder is not None
        finally:
            config.CACHE_DIR = configured


@functools.cache
def _cache_folder() -> Path | None:
    """Returns the folder for compiled kernels, None where nothing can be written.

    Its parent is NUMBA_CACHE_DIR where that is set, else numba's usual places: `__pycache__` beside the
    kernels, then the user's cache directory.
    """
    usual = (_KERNELS / "__pycache__", AppDirs("numba", appauthor=False).user_cache_dir)
    parents = (config.CACHE_DIR,) if config.CACHE_DIR else usual
    for parent in parents:
        folder = Path(parent) / f"outrider-kernels-{_cache_key()}"
        try:
            is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        if is_new:
            _fill(folder)
        return folder
    places = " nor ".join(map(str, parents))
    log.warning("cannot write to %s: the kernels are compiled again at every start (NUMBA_CACHE_DIR)", places)
    return None


def _fill(folder: Path) -> None:
    """Compiles all kernels to a folder in other processes, as LLVM would keep 300 MB of this one's memory.

    Those of layers and those of rows are compiled side by side. What is left undone, this process compiles for itself.
    """
    log.info("compiling the kernels, once on a machine")
    with ThreadPoolExecutor() as pool:
        list(pool.map(functools.partial(_compile, folder), (_HOST, _HOST / "rows")))


def _compile(folder: Path, sources: Path) -> None:
    """Compiles the kernels of one folder of sources to `folder` in another process."""
    package = ".".join(("outrider", *sources.relative_to(_KERNELS.parent).parts))
    names = [path.stem for path in sorted(sources.glob("*.py")) if path.stem != "__init__"]
    # Modules are looked for where this process looks, and not in the current folder.
    program = [f"import sys; sys.path[:] = {sys.path!r}", *(f"import {package}.{name}" for name in names)]
    try:
        subprocess.run(
            [sys.executable, "-P", "-c", "\n".join(program)],
            env=os.environ | {"NUMBA_CACHE_DIR": str(folder.parent)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        log.warning("no process could be started to compile the kernels: %s", error)
    except subprocess.CalledProcessError as error:
        if error.returncode != -signal.SIGINT:  # Ctrl-C, which reaches this process too
            last = error.stderr.strip().rpartition("\n")[2]
            log.warning("the process that compiles the kernels ended with %d: %s", error.returncode, last)
            log.debug("%s", error.stderr)


def _cache_key() -> str:
    versions = platform.python_version(), numba.__version__, llvmlite.__version__, np.__version__
    digest = hashlib.sha256(repr(versions).encode())
    for path in sorted(_KERNELS.rglob("*.py")):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(_KERNELS)} {len(source)} ".encode() + source)
    return digest.hexdigest()[:16]
