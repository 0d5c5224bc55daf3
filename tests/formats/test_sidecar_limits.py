"""Records of ours that somebody has edited: numbers, nesting and names that nothing of ours writes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ema_ckpt
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats import sidecar

PRIME = 2**61 - 1
HUGE = "9" * 400


def record(value: str) -> str:
    item = f'{{"name":"x","path":["x"],"value":{value}}}'
    return f'{{"version":1,"digests":{{}},"objects":[{item}]}}'


DAMAGED = {
    "float of an integer": record(f'{{"$float":{HUGE}}}'),
    "complex": record(f'{{"$complex":[{HUGE},0]}}'),
    "list in lists": record("[" * 2000 + "]" * 2000),
    "tuple in tuples": record('{"$tuple":[' * 900 + "1" + "]}" * 900),
    "key in tuples": '{{"version":1,"digests":{{}},"keys":[[["x"],{}1{}]]}}'.format(
        '{"$tuple":[' * 900, "]}" * 900
    ),
    "key that is a list": '{"version":1,"digests":{},"keys":[[["x"],[1]]]}',
    "not a dtype": record('{"$dtype":"nope"}'),
    "keys that collide": record(
        '{{"$dict":[{}]}}'.format(",".join(f"[{PRIME * i},0]" for i in range(1, 60_000)))
    ),
    "set of keys that collide": record(
        '{{"$set":[{}]}}'.format(",".join(str(PRIME * i) for i in range(1, 60_000)))
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_record_that_nobody_wrote_is_refused_by_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"w": np.zeros(1, "f4")}, file, metadata={"ema_ckpt": DAMAGED[name]})
    started = time.process_time()
    with pytest.raises(SourceError) as caught:
        ema_ckpt.inspect(file)
    assert "a.safetensors" in str(caught.value) and len(str(caught.value)) < 5000
    assert time.process_time() - started < 5


@pytest.mark.parametrize("depth", [50, 140])
@pytest.mark.parametrize(
    "wrap", [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {1: v}]
)
def test_what_is_written_can_be_read_again(depth: int, wrap: object) -> None:
    value: object = 1
    for _ in range(depth):
        value = wrap(value)
    text = json.dumps(sidecar.encode(value))
    assert sidecar.decode(json.loads(text)) == value


@pytest.mark.parametrize("depth", [200, 900, 5000])
def test_what_nests_deeper_is_not_written(depth: int) -> None:
    value: object = 1
    for _ in range(depth):
        value = [value]
    with pytest.raises(TypeError, match="nests"):
        sidecar.encode(value)


@pytest.mark.parametrize(
    "total", ["1e999", "-1e999", "1e400", "-5", "true", '"x"', HUGE, "null", "[]", "4.0", "4"]
)
def test_a_total_that_is_no_count_is_no_crash(tmp_path: Path, total: str) -> None:
    save_file({"w": np.zeros(1, "f4")}, tmp_path / "model-1.safetensors")
    index = f'{{"metadata":{{"total_size":{total}}},"weight_map":{{"w":"model-1.safetensors"}}}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert [t.name for t in ema_ckpt.inspect(tmp_path).tensors] == ["w"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("\\ud800.safetensors", "unsafe-path"),
        ("a\\u0000b", "unsafe-path"),
        ("..", "unsafe-path"),
        ("x" * 300, "missing-file"),
        ("x" * 5000, "missing-file"),
        ("w/" * 3000 + "w", "missing-file"),
    ],
)
def test_names_of_files_pass_one_door(tmp_path: Path, name: str, code: str) -> None:
    index = f'{{"weight_map":{{"w":"{name}"}}}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(SourceError) as caught:
        ema_ckpt.consolidate(tmp_path, tmp_path / "out.pt")
    assert caught.value.code == code
    assert "\n" not in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize("basename", ["a\0b", "x" * 300, "\ud800", "é" * 101, "", "..", "a/b"])
def test_a_basename_that_no_file_can_have_is_refused(tmp_path: Path, basename: str) -> None:
    save_file({"w": np.zeros(1, "f4")}, tmp_path / "a.safetensors")
    with pytest.raises(ema_ckpt.UsageError) as caught:
        ema_ckpt.consolidate(tmp_path / "a.safetensors", tmp_path / "out", basename=basename)
    assert caught.value.code == "usage" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["a\0b", "\ud800", ""])
def test_a_target_that_no_file_can_have_is_refused(tmp_path: Path, target: str) -> None:
    save_file({"w": np.zeros(1, "f4")}, tmp_path / "a.safetensors")
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        ema_ckpt.consolidate(tmp_path / "a.safetensors", target)
    assert caught.value.code == "usage"
