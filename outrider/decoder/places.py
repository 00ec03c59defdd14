"""Reads what `setup` is given: an address, a directory, or the id of a cached model."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.common.errors import ModelError

GRPC = "grpc://"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def find_target(path: str | Path) -> Path:
    """Returns the directory of a target: the path itself, or the newest cached files of a hub id. Raises `ModelError`;
    nothing is downloaded."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if not _HUB_ID.fullmatch(str(path)):
        raise ModelError(f"there is no model directory at {path}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), local_files_only=True))
    except Exception as error:  # of several kinds, none of which is the user's concern
        raise ModelError(
            f"{path} is neither a directory nor a cached model", f"fetch it first: hf download {path}"
        ) from error


def find_device() -> str:
    """Returns cuda where torch finds it, else cpu."""
    from outrider.cloud_verifier.backends.loading import resolve_device

    return resolve_device("auto")
