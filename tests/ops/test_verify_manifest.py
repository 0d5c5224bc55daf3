"""verify --manifest: what it writes sha256sum reads, and what sha256sum writes it reads."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file

import ema_ckpt
from ema_ckpt import EmaCkptError, SourceError, TargetError, UsageError, verify
from ema_ckpt.ops import verify_manifest
from tests.checkpoints import save_dcp

REPO = Path(__file__).parents[2]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Hugging Face directory of two shards, beside them a file of the user's and one in a folder."""
    source = save_dcp(tmp_path / "source", {"model": {n: torch.randn(64, 64) for n in "ab"}})
    path = tmp_path / "c"
    ema_ckpt.consolidate(source, path, max_shard_size="20kB")
    (path / "config.json").write_text("{}")
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "vocab.txt").write_text("a\n")
    return path


def sha256sum(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["sha256sum", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def names_in(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def test_what_it_writes_sha256sum_reads(checkpoint: Path, tmp_path: Path) -> None:
    sums = tmp_path / "sums"
    found = verify(checkpoint, manifest=sums)
    assert (found.status, found.manifest.written) == ("sound", True)
    assert found.manifest.files == len(names_in(checkpoint)) == 6
    ended = sha256sum(checkpoint, "--check", "--strict", sums)
    assert ended.returncode == 0, ended.stderr
    assert sorted(line.removesuffix(": OK") for line in ended.stdout.splitlines()) == names_in(
        checkpoint
    )
    assert found.manifest.nbytes == sum(
        p.stat().st_size for p in checkpoint.rglob("*") if p.is_file()
    )


@pytest.mark.parametrize("options", [(), ("--binary",), ("--tag",)])
def test_what_sha256sum_writes_it_reads(options, checkpoint: Path, tmp_path: Path) -> None:
    sums = tmp_path / "sums"
    listed = [f"./{name}" for name in names_in(checkpoint)]
    sums.write_text(sha256sum(checkpoint, *options, *listed).stdout)
    found = verify(checkpoint, manifest=sums, check=True)
    assert (found.status, found.manifest.written, found.manifest.files) == ("sound", False, 6)
    assert not found.warnings


def test_a_flipped_bit_is_found_in_any_file(checkpoint: Path, tmp_path: Path) -> None:
    sums = tmp_path / "sums"
    verify(checkpoint, manifest=sums)
    for name in names_in(checkpoint):
        raw = bytearray((checkpoint / name).read_bytes())
        raw[-1] ^= 1
        (checkpoint / name).write_bytes(raw)
        for quick in (False, True):
            found = verify(checkpoint, manifest=sums, quick=quick)
            assert found.status == "damaged"
            assert ("checksum", name) in [(p.code, p.file) for p in found.problems]
        assert sha256sum(checkpoint, "--check", "--status", sums).returncode == 1
        raw[-1] ^= 1
        (checkpoint / name).write_bytes(raw)
    assert verify(checkpoint, manifest=sums).status == "sound"


def test_missing_and_extra_files_are_said(checkpoint: Path, tmp_path: Path) -> None:
    sums = tmp_path / "sums"
    verify(checkpoint, manifest=sums)
    (checkpoint / "config.json").unlink()
    (checkpoint / "README.md").write_text("new")
    found = verify(checkpoint, manifest=sums)
    assert [(p.code, p.file) for p in found.problems] == [("missing-file", "config.json")]
    (said,) = [w.message for w in found.warnings if w.code == "unchecked"]
    assert "1 file beside those that it lists: 'README.md'; not compared" in said
    assert found.manifest.files == 5


def test_a_manifest_proves_payload_that_carries_no_checksum(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.randn(100)}, file)
    assert verify(file).status == "unproven"
    assert (
        verify(file, manifest=tmp_path / "sums").status == "unproven"
    )  # there was nothing to compare
    for quick in (True, False):
        found = verify(file, manifest=tmp_path / "sums", quick=quick)
        assert (found.status, found.checked_bytes, found.unchecked_bytes) == ("sound", 400, 0)
    assert (tmp_path / "sums").read_text().endswith("  model.safetensors\n")
    save_file({"w": torch.randn(100)}, file)
    assert [p.code for p in verify(file, manifest=tmp_path / "sums").problems] == ["checksum"]


def test_a_manifest_that_lists_half_proves_half(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "source", {"model": {n: torch.randn(64, 64) for n in "ab"}})
    ema_ckpt.consolidate(source, tmp_path / "c", max_shard_size="20kB")
    (tmp_path / "c" / "ema_ckpt.json").unlink()
    first = "model-00001-of-00002.safetensors"
    (tmp_path / "sums").write_text(sha256sum(tmp_path / "c", first).stdout)
    found = verify(tmp_path / "c", manifest=tmp_path / "sums")
    assert (found.status, found.checked_bytes, found.unchecked_bytes) == ("unproven", 16384, 16384)


def exchange(path: Path) -> None:
    (path / "__0_0.distcp").rename(path / "aside")
    (path / "__1_0.distcp").rename(path / "__0_0.distcp")
    (path / "aside").rename(path / "__1_0.distcp")


def test_pieces_that_are_exchanged_with_the_metadata_are_not_proved(
    fixtures: Path, tmp_path: Path
) -> None:
    """Torch's own files of two ranks, and metadata that a manifest of the data files leaves out."""
    path = tmp_path / "c"
    shutil.copytree(fixtures / "dcp" / "strided-w2", path)
    data = ["__0_0.distcp", "__1_0.distcp"]
    (tmp_path / "data").write_text(sha256sum(path, *data).stdout)
    verify(path, manifest=tmp_path / "all")
    raw = (path / ".metadata").read_bytes()
    swapped = (
        raw.replace(b"__0_0", b"__X_0").replace(b"__1_0", b"__0_0").replace(b"__X_0", b"__1_0")
    )
    (path / ".metadata").write_bytes(swapped)
    alone = verify(path)
    assert (alone.status, alone.problems) == ("sound", ())  # torch records nothing to tell it by
    assert any("placement" in w.message for w in alone.warnings if w.code == "unchecked")
    for quick in (False, True):
        found = verify(path, manifest=tmp_path / "data", quick=quick)
        assert (found.status, found.problems) == ("unproven", ())
        assert found.manifest.uncovered == (".metadata",)
        assert any("'.metadata' of the checkpoint itself" in w.message for w in found.warnings)
        found = verify(path, manifest=tmp_path / "all", quick=quick)
        assert [(p.code, p.file) for p in found.problems] == [("checksum", ".metadata")]
        ended = command(path, "--manifest", tmp_path / "data", *["--quick"] * quick)
        assert ended.returncode == 3
        assert "leaves out 1" in ended.stdout
    (path / ".metadata").write_bytes(raw)
    exchange(path)
    found = verify(path, manifest=tmp_path / "all")
    assert {(p.code, p.file) for p in found.problems} == {("checksum", name) for name in data}
    exchange(path)
    found = verify(path, manifest=tmp_path / "all")
    assert (found.status, found.warnings) == ("sound", ()), "a whole manifest tells whose files are"


def test_the_files_of_every_part_have_to_be_listed(tmp_path: Path) -> None:
    for part, fill in (("model", 1.0), ("ema", 2.0)):
        save_dcp(tmp_path / "step_1" / part, {"w": torch.full((3,), fill)})
    alone = verify(tmp_path / "step_1")
    (said,) = [w.message for w in alone.warnings if "placement" in w.message]
    assert "'ema/__0_0.distcp'" in said and "'model/__0_0.distcp'" in said
    verify(tmp_path / "step_1", manifest=tmp_path / "all")
    lines = (tmp_path / "all").read_text().splitlines(True)
    assert len(lines) == 4
    for left_out in lines:
        (tmp_path / "some").write_text("".join([line for line in lines if line != left_out]))
        found = verify(tmp_path / "step_1", manifest=tmp_path / "some", quick=True)
        assert (found.status, found.problems) == ("unproven", ())
        assert found.manifest.uncovered == (left_out.split()[1],)
    whole = verify(tmp_path / "step_1", manifest=tmp_path / "all", quick=True)
    assert (whole.status, whole.warnings) == ("sound", ())


def test_files_of_one_size_that_a_record_places_are_not_warned_of(
    fixtures: Path, tmp_path: Path
) -> None:
    ema_ckpt.reshard(fixtures / "dcp" / "strided-w2", tmp_path / "ours", 2)
    assert verify(tmp_path / "ours").warnings == ()


@pytest.mark.parametrize(
    "name", ["new\nline", "back\\slash", "carriage\rreturn", " blank ", "*star"]
)
def test_names_are_escaped_as_sha256sum_does(name: str, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / name).write_text("x")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    verify(checkpoint, manifest=ours)
    theirs.write_bytes(
        subprocess.run(["sha256sum", *sorted(names_in(checkpoint))], cwd=checkpoint, capture_output=True, check=True).stdout
    )  # fmt: skip
    assert ours.read_bytes() == theirs.read_bytes()
    assert verify(checkpoint, manifest=theirs, check=True).manifest.files == 7
    assert sha256sum(checkpoint, "--check", "--status", ours).returncode == 0


def test_a_name_that_is_no_text(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / os.fsdecode(b"odd\xff")).write_text("x")
    verify(checkpoint, manifest=tmp_path / "sums")
    assert sha256sum(checkpoint, "--check", "--status", tmp_path / "sums").returncode == 0
    assert verify(checkpoint, manifest=tmp_path / "sums").manifest.files == 7


def test_the_manifest_may_lie_in_the_checkpoint(checkpoint: Path) -> None:
    sums = checkpoint / "SHA256SUMS"
    assert verify(checkpoint, manifest=sums).manifest.files == 6
    assert "SHA256SUMS" not in sums.read_text()
    found = verify(checkpoint, manifest=sums)
    assert (found.status, found.warnings) == ("sound", ())


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "unreadable"),
        ("# nothing\n", "unreadable"),
        ("abc  model.safetensors\n", "unreadable"),
        ("0" * 64 + "  a\n" + "1" * 64 + "  a\n", "unreadable"),
        ("\\" + "0" * 64 + "  a\\x\n", "unreadable"),
        ("0" * 64 + "  ../source/.metadata\n", "unsafe-path"),
        ("0" * 64 + "  /etc/passwd\n", "unsafe-path"),
    ],
)
def test_a_manifest_that_is_none_is_refused(
    text: str, code: str, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "sums").write_text(text)
    with pytest.raises(SourceError) as refused:
        verify(checkpoint, manifest=tmp_path / "sums")
    assert refused.value.code == code


def test_a_damaged_checkpoint_gets_no_manifest(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model-00001-of-00002.safetensors").unlink()
    found = verify(checkpoint, manifest=tmp_path / "sums")
    assert (found.status, found.manifest) == ("damaged", None)
    assert any("sums: not written" in w.message for w in found.warnings)
    assert not (tmp_path / "sums").exists()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_that_changes_while_it_is_hashed(
    moment: str,
    name: str,
    is_there: bool,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sums = tmp_path / "sums"
    if is_there:
        verify(checkpoint, manifest=sums)
    hash_files = verify_manifest.hash_files

    def change() -> None:
        (checkpoint / name).write_bytes((checkpoint / name).read_bytes()[:-1] + b"?")

    def hash_changed(*arguments: Any) -> Any:
        if moment == "before":
            change()
        found = hash_files(*arguments)
        if moment == "after":
            change()
        return found

    monkeypatch.setattr(verify_manifest, "hash_files", hash_changed)
    with pytest.raises(SourceError, match=f"'{name}' changed while being read") as caught:
        verify(checkpoint, manifest=sums)
    assert caught.value.code == "source-changed"
    assert sums.exists() == is_there


def test_a_file_system_without_links(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # as exFAT answers

    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr("ema_ckpt.writing.switch.renameat2", lambda *_: False)
    manifest = tmp_path / "sums"
    assert verify(checkpoint, manifest=manifest).manifest.written
    assert verify(checkpoint, manifest=manifest).status == "sound"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".draft")]


def test_steps_and_rank_files(fixtures: Path, tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(fixtures / "dcp" / "fsdp2-w2", tmp_path / "run" / f"step_{step}")
    verify(tmp_path / "run", manifest=tmp_path / "sums")
    assert sha256sum(tmp_path / "run" / "step_2", "--check", tmp_path / "sums").returncode == 0
    shutil.copytree(fixtures / "rank-files" / "replicas", tmp_path / "ranks")
    verify(tmp_path / "ranks", manifest=tmp_path / "sums-2")
    assert len((tmp_path / "sums-2").read_text().splitlines()) == len(names_in(tmp_path / "ranks"))


def test_behind_a_url(checkpoint: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for name in names_in(checkpoint):
        memory.pipe_file(f"/sums/{name}", (checkpoint / name).read_bytes())
    try:
        verify("memory://sums", manifest=tmp_path / "sums")
        assert sha256sum(checkpoint, "--check", "--status", tmp_path / "sums").returncode == 0
        assert verify("memory://sums", manifest=tmp_path / "sums").status == "sound"
    finally:
        memory.rm("/sums", recursive=True)


# ---------------------------------------------------------------- the command


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "ema_ckpt", "verify", *map(str, arguments)]
    return subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=False)


def test_the_command(checkpoint: Path, tmp_path: Path) -> None:
    sums = tmp_path / "sums"
    absent = command(checkpoint, "--manifest", sums, "--check", "--json")
    assert absent.returncode == 2
    assert json.loads(absent.stdout)["error"]["code"] == "not-found"
    written = command(checkpoint, "--manifest", sums)
    assert written.returncode == 0
    assert f"wrote {sums}, with the digests of 6 files" in written.stdout
    compared = command(checkpoint, "--manifest", sums, "--check", "--quick", "--json")
    assert compared.returncode == 0
    manifest = json.loads(compared.stdout)["manifest"]
    assert (manifest["path"], manifest["written"], manifest["files"]) == (str(sums), False, 6)
    (checkpoint / "config.json").write_text("[]")
    differs = command(checkpoint, "--manifest", sums, "--quick")
    assert differs.returncode == 1
    assert "checksum: config.json: expected SHA-256" in differs.stdout


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"check": True}, UsageError),
        ({"manifest": "s3://bucket/sums"}, UsageError),
        ({"manifest": "/dev/null"}, UsageError),
        ({"manifest": "/proc/none/sums"}, TargetError),
    ],
)
def test_wrong_use(options: dict[str, object], kind: type[EmaCkptError], checkpoint: Path) -> None:
    with pytest.raises(kind):
        verify(checkpoint, quick=True, **options)  # type: ignore[arg-type]
