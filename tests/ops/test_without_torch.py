"""torch is an extra: every verb, `latest` and the import work where it cannot be had; what needs it says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

import ema_ckpt
from ema_ckpt.core import torch_import

REPO = Path(__file__).parents[2]

BLOCKED = {
    "absent": "import sys; sys.modules['torch'] = None",
    "unfound": (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch': raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Finder())"
    ),
    "broken": (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ImportError('libcudart.so.13: cannot open shared object file')\n"
        "sys.meta_path.insert(0, Finder())"
    ),
}


def ended(code: str, blocked: str = "absent", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{BLOCKED[blocked]}\n{code}"],
        cwd=REPO, env=os.environ | env, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        "inspect RUN --shards", "consolidate RUN OUT.safetensors", "consolidate RUN OUT.pt --dtype bf16",
        "consolidate RUN OUT --max-shard-size 200", "reshard RUN OUT --world-size 3", "convert RUN OUT.pt",
        "convert RUN OUT.safetensors", "diff RUN --html PAGE.html", "verify RUN --values",
        "synthesize RUN RUN OUT.safetensors --weights 0.5,0.5",
    ],
)  # fmt: skip
def test_every_verb(words: str, tmp_path: Path) -> None:
    run = shutil.copytree(REPO / "fixtures/dcp/fsdp2-w4", tmp_path / "step_5")
    places = {"RUN": str(run), "OUT": str(tmp_path / "out"), "PAGE": str(tmp_path / "page")}
    argv = [places.get(w.partition(".")[0], w.partition(".")[0]) + "".join(w.partition(".")[1:])
            if w[0].isupper() else w for w in words.split()]  # fmt: skip
    done = ended(f"from ema_ckpt.cli.main import main; main({argv!r})")
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stderr


@pytest.mark.parametrize("fixture", ["torch", "safetensors", "rank-files", "hf"])
def test_every_format(fixture: str) -> None:
    codes = {0, 3}
    for path in sorted((REPO / "fixtures" / fixture).iterdir()):
        code = f"from ema_ckpt.cli.main import main; main(['verify', {str(path)!r}, '--json'])"
        done = ended(code)
        assert done.returncode in codes, (path, done.stderr)


def test_quantised_weights(tmp_path: Path) -> None:
    """Values are computed with numpy alone, from what every package writes."""
    truth = json.loads((REPO / "fixtures/quantized.json").read_text())
    calls = [
        f"ema_ckpt.consolidate({str(REPO / 'fixtures' / name)!r}, {str(tmp_path / f'{i}.pt')!r}, "
        "dequantize='bf16')"
        for i, (name, weights) in enumerate(truth.items())
        if weights
    ]
    done = ended("\n".join(["import ema_ckpt", *calls]))
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.iterdir())) == len(calls) > 10


def test_latest(tmp_path: Path) -> None:
    shutil.copytree(REPO / "fixtures/dcp/fsdp2-w2", tmp_path / "step_5")
    done = ended(f"import ema_ckpt; print(ema_ckpt.latest({str(tmp_path)!r}).name)")
    assert done.stdout.strip() == "step_5", done.stderr


@pytest.mark.parametrize("blocked", BLOCKED)
@pytest.mark.parametrize("name", ["ShardedEMA", "Warmup", "save", "restore", "offload_optimizer"])
def test_the_training_side(name: str, blocked: str) -> None:
    code = (
        "import ema_ckpt\n"
        f"try: ema_ckpt.{name}\n"
        "except ema_ckpt.EmaCkptError as error: print(error.code, error)"
    )
    done = ended(code, blocked)
    assert done.stdout.startswith(f"missing-extra ema_ckpt.{name} needs torch"), done.stderr
    assert "pip install 'ema-ckpt[train]'" in done.stdout
    assert ("libcudart" in done.stdout) is (blocked == "broken")


@pytest.mark.parametrize(
    "call", ["c['model.gain']", "c.state_dict('model')", "c.state_dict(dtype='bf16')"]
)
def test_reading_a_tensor(call: str) -> None:
    code = (
        "import ema_ckpt\n"
        f"with ema_ckpt.open('fixtures/dcp/fsdp2-w2') as c:\n"
        "    print(len(c.trees) > 1, 'model.gain' in c.keys())\n"
        f"    try: {call}\n"
        "    except ema_ckpt.EmaCkptError as error: print(error.code)"
    )
    assert ended(code).stdout.split() == ["True", "True", "missing-extra"]


@pytest.mark.parametrize("blocked", BLOCKED)
@pytest.mark.parametrize("world", ["1", "2", None])
def test_several_processes(world: str | None, blocked: str, tmp_path: Path) -> None:
    launched = {
        "RANK": "0",
        "WORLD_SIZE": world or "",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    argv = [
        "reshard",
        "fixtures/dcp/fsdp2-w2",
        str(tmp_path / "out"),
        "--world-size",
        "2",
        "--distributed",
    ]
    env = launched if world else {}
    done = ended(f"from ema_ckpt.cli.main import main; main({[*argv, '--json']!r})", blocked, **env)
    assert done.returncode == 2
    assert '"code": "missing-extra"' in done.stdout


@pytest.mark.parametrize(
    ("version", "warns"),
    [
        ("2.10.9", True),
        ("2.11.0", False),
        ("2.13.0+cpu", False),
        ("2.15.0+cu132", False),
        ("2.16.0a0+git12", True),
        ("3.0", True),
    ],
)
def test_a_torch_outside_the_range_is_told_once(
    version: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_import, "_checked", False)
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            torch_import.import_torch("a test")
    assert len(told) == warns
    if warns:
        assert "2.11 up to, without, 2.16" in str(told[0].message)


def test_the_range_is_that_of_the_extra() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    first, end = torch_import.TESTED
    extras = project["optional-dependencies"]
    assert extras["train"] == [f"torch>={first[0]}.{first[1]},<{end[0]}.{end[1]}"]
    assert "ema-ckpt[train]" in extras["test"]
    assert not [name for name in project["dependencies"] if name.startswith("torch")]
    assert ema_ckpt.__version__ == project["version"]
