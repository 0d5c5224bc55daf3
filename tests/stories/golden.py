"""The golden record: what the commands said and wrote on the day it was taken, with wording, paths and times masked.

It knows nothing of right and wrong; it says that something changed, and what.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.stories.cells import Run, Runs
from tests.stories.commands import FIXTURES, environment

GOLDEN = Path(__file__).with_name("golden.json")
_MASKED = {"seconds", "message", "reason"}
_LONGEST = 600  # characters of a part of a document that is kept in full


def load() -> dict[str, object]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def save(entries: dict[str, object]) -> None:
    """One line an entry, sorted, so that a change shows as changed lines."""
    lines = (f"{json.dumps(key)}: {_canonical(entries[key])}" for key in sorted(entries))
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def document(run: Run, root: Path) -> object:
    """The whole document of a run without what differs from run to run."""
    return _masked(run.ended.document, re.compile(f"{re.escape(str(root))}/[0-9]+"))


def _masked(value: object, scratch: re.Pattern[str]) -> object:
    if isinstance(value, dict):
        return {
            key: "…" if key in _MASKED else _masked(item, scratch) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_masked(item, scratch) for item in value]
    if isinstance(value, float):
        return float(f"{value:.9g}")  # sums of floats end differently on other processors
    return (
        scratch.sub("OUT", value.replace(str(FIXTURES), "FIXTURES"))
        if isinstance(value, str)
        else value
    )


def entry(run: Run, runs: Runs) -> dict[str, object]:
    """What is recorded of a run."""
    whole = document(run, runs.root)
    kept = {key: _shortened(part) for key, part in whole.items()}
    files = {name: [len(data), _digest(data)] for name, data in run.files().items()}
    return {"exit": run.ended.code, "document": kept, **({"files": files} if files else {})}


def _shortened(part: object) -> object:
    text = _canonical(part)
    if len(text) <= _LONGEST:
        return part
    return {"items": len(part), "sha256": _digest(text.encode())}


def _digest(data: bytes) -> str:
    """The first 80 bits of the SHA-256: enough to see a change, and short enough to keep thousands of them."""
    return hashlib.sha256(data).hexdigest()[:20]


def public_names() -> dict[str, object]:
    """The public names of the package that the commands run, by a process of its own."""
    command = [sys.executable, "-P", Path(__file__).with_name("public_names.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def differences(recorded: object, found: object, at: str = "") -> Iterator[str]:
    """Where two entries differ, one line a place."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in sorted(recorded.keys() | found.keys()):
            there = f"{at}.{key}" if at else key
            if key not in found:
                yield f"{there}: recorded {_canonical(recorded[key])}, not there any more"
            elif key not in recorded:
                yield f"{there}: found {_canonical(found[key])}, not recorded"
            else:
                yield from differences(recorded[key], found[key], there)
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for index, pair in enumerate(zip(recorded, found, strict=True)):
            yield from differences(*pair, f"{at}[{index}]")
    elif recorded != found:
        yield f"{at}: recorded {_canonical(recorded)}, found {_canonical(found)}"


def complaint(key: str, recorded: object, found: object) -> str:
    """What differs from the record, and how to see more; empty if nothing does."""
    lines = [f"  {line}" for line in differences(recorded, found)]
    if not lines:
        return ""
    show = f"  python -m tests.stories.record_golden show {key!r}"
    hint = "To see documents and files whole, with this code and with PYTHONPATH naming a checkout of the older one:"
    return "\n".join([f"{key} is not as recorded:", *lines, hint, show])
