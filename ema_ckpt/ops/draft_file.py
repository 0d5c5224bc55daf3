"""A small file beside the place that it is for, so that nobody reads half of it."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ema_ckpt.core.display import displayed
from ema_ckpt.storage.files import is_gone
from ema_ckpt.writing.switch import fsync_path


@contextmanager
def draft_beside(place: Path, content: bytes) -> Iterator[Path]:
    """Write a file in a directory of its own beside `place`, which the block links or moves there.

    Where that directory cannot be deleted, that is logged to `ema_ckpt`: the place is not affected.

    Raises:
        OSError: it could not be written.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=".draft.ema-ckpt-", dir=place.parent)
    try:
        draft = Path(folder, "draft")
        draft.write_bytes(content)
        fsync_path(draft)
        yield draft
    finally:
        with suppress(OSError):  # of a few calls it raises them all the same
            shutil.rmtree(folder, ignore_errors=True)
        if not is_gone(folder):
            message = f"{folder}: left behind, could not be deleted; delete it by hand"
            logging.getLogger("ema_ckpt").warning(displayed(message))
