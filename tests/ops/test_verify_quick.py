"""verify --quick and check: every mutation that can be seen without payload is found, and none of its bytes is read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

import ema_ckpt
from ema_ckpt import EmaCkptError, SourceError, UsageError, check, verify
from ema_ckpt.ops.results.verify import GateResult
from tests.checkpoints import ema, save_dcp, save_replicas, weights
from tests.ops.test_verify import DAMAGED, HONEST

REPO = Path(__file__).parents[2]
PAYLOAD = {"flipped-byte", "flipped-byte.pt"}  # what only the payload tells


def state(scale: int) -> dict[str, object]:
    """A state whose tensors, and with them all files, differ in size from those of another scale."""
    generator = torch.Generator().manual_seed(scale)
    tensors = {
        name: torch.randn(8 * scale, 4, generator=generator) for name in ("a.w", "b.w", "c.w")
    }
    return {"model": tensors}


def stock_dcp(path: Path, scale: int) -> None:
    save_replicas(path, {**state(scale), "ema": {**ema(), "weights": weights()}}, ranks=3)


def our_dcp(path: Path, scale: int) -> None:
    source = save_dcp(path.with_name(f"{path.name}-source"), state(scale))
    ema_ckpt.reshard(source, path, world_size=3)


def hugging_face(path: Path, scale: int) -> None:
    source = save_dcp(path.with_name(f"{path.name}-source"), state(scale))
    ema_ckpt.consolidate(source, path, max_shard_size=128 * scale)
    (path / "ema_ckpt.json").unlink()
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().rstrip())  # its last byte means something


def our_hugging_face(path: Path, scale: int) -> None:
    source = save_dcp(path.with_name(f"{path.name}-source"), state(scale))
    ema_ckpt.consolidate(source, path, max_shard_size=128 * scale)


@pytest.mark.parametrize("quick", [True, False])
def test_the_holes_of_a_missing_rank_file_say_that_they_follow_from_it(
    quick: bool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(REPO / "fixtures/rank-files/torch-2.14.1", run)
    (run / "model_world_size_2_rank_1.pt").unlink()
    problems = verify(run, quick=quick).problems
    assert [problem.code for problem in problems] == ["incomplete", "hole", "hole"]
    assert "rank 1 of 2" in problems[0].message
    for hole in problems[1:]:
        assert (
            "rows 3 to 4 of 5; the rest is in 'model_world_size_2_rank_0.pt'; follows from"
            in hole.message
        )
        assert "did not save" not in hole.message
    holed = verify(REPO / "fixtures/nasty/hole", quick=quick).problems
    assert any("did not save its part" in problem.message for problem in holed)


def rank_files(path: Path, scale: int) -> None:
    path.mkdir()
    for rank in range(2):
        torch.save(state(scale), path / f"step_5_rank_{rank}_world_size_2.pt")


def parts(path: Path, scale: int) -> None:
    for part in ("model", "ema"):
        ema_ckpt.consolidate(
            save_dcp(path.with_name(f"{path.name}-{part}"), state(scale)), path / part
        )


def one_file(path: Path, scale: int) -> None:
    path.mkdir()
    save_file(state(scale)["model"], path / "model.safetensors")


def torch_file(path: Path, scale: int) -> None:
    path.mkdir()
    torch.save(state(scale), path / "checkpoint.pt")


MAKERS = (
    stock_dcp, our_dcp, hugging_face, our_hugging_face, rank_files, parts, one_file, torch_file
)  # fmt: skip


@pytest.fixture(scope="module", params=MAKERS, ids=lambda maker: maker.__name__)
def checkpoints(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and one of other shapes under the same names."""
    folder = tmp_path_factory.mktemp(request.param.__name__)
    request.param(folder / "c", 1)
    request.param(folder / "other", 2)
    return folder / "c", folder / "other"


def files_in(path: Path) -> list[str]:
    """Files that hold something, by name."""
    found = [p for p in path.rglob("*") if p.is_file() and p.stat().st_size]
    return sorted(str(p.relative_to(path)) for p in found)


def truncated_to(nbytes: Callable[[int], int]) -> Callable[[Path, Path], None]:
    return lambda file, _other: os.truncate(file, nbytes(file.stat().st_size))


MUTATIONS: dict[str, Callable[[Path, Path], None]] = {
    "missing": lambda file, _other: file.unlink(),
    "truncated by one": truncated_to(lambda size: size - 1),
    "truncated by half": truncated_to(lambda size: size // 2),
    "truncated to nothing": truncated_to(lambda _size: 0),
    "foreign": lambda file, other: shutil.copyfile(other, file),
}


def mutated(checkpoints: tuple[Path, Path], copy: Path) -> Iterator[tuple[str, str]]:
    """Yield each file and mutation in turn, done to `copy`."""
    honest, other = checkpoints
    for name in files_in(honest):
        for mutation, mutate in MUTATIONS.items():
            shutil.copytree(honest, copy)
            mutate(copy / name, other / name)
            yield name, mutation
            shutil.rmtree(copy)


# What nothing else in a checkpoint tells of: the record is an addition, and one file may be another checkpoint's whole.
UNSEEN = {
    ("ema_ckpt.json", "missing"),
    ("model.safetensors", "foreign"),
    ("checkpoint.pt", "foreign"),
}
# Said, and no damage: a record that is about other files is not used, sizes and shapes may differ.
ONLY_WARNED = {"stale-file", "index-mismatch", "unchecked"}


def test_every_truncated_missing_or_foreign_file_is_found(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    honest, other = checkpoints
    assert files_in(honest) == files_in(other)
    before = verify(honest, quick=True)
    assert before.status == "unproven"
    for name, mutation in mutated(checkpoints, tmp_path / "c"):
        try:
            warnings = check(tmp_path / "c").warnings
        except EmaCkptError as error:
            assert error.code != "internal"
            continue
        new = {w.code for w in warnings if w not in before.warnings}
        if (Path(name).name, mutation) in UNSEEN:
            # Another whole file, of which a neighbour or the record may tell all the same.
            assert new <= {"ema-unrelated", "stale-file"}, (name, mutation)
        else:
            assert new, (name, mutation)
            assert new <= ONLY_WARNED, (name, mutation)
            assert mutation == "foreign" or name.endswith(".json"), (name, mutation)


def test_a_stale_file_is_named(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    honest, _ = checkpoints
    kinds = {Path(name).suffix for name in files_in(honest)} & {".distcp", ".safetensors"}
    for kind in kinds:
        copy = tmp_path / f"c{kind}"
        shutil.copytree(honest, copy)
        sample = next(copy / n for n in files_in(honest) if n.endswith(kind))
        added = {".distcp": "__9_0.distcp", ".safetensors": "model-00009-of-00009.safetensors"}
        shutil.copyfile(sample, sample.with_name(added[kind]))
        try:
            found = verify(copy, quick=True)
        except EmaCkptError as error:
            assert added[kind] in str(error)
        else:
            said = [*found.warnings, *found.problems]
            assert any(
                added[kind] in item.message or item.code == "missing-metadata" for item in said
            )


@pytest.mark.parametrize("maker", [our_dcp, our_hugging_face])
def test_files_of_another_save_of_the_same_shapes(maker, tmp_path: Path) -> None:
    """Our record has a checksum of each item, and each item's header has its own."""
    maker(tmp_path / "c", 1)
    other = save_dcp(
        tmp_path / "later",
        {"model": {n: t + 1 for n, t in state(1)["model"].items()}},  # type: ignore[attr-defined]
    )
    if maker is our_dcp:
        ema_ckpt.reshard(other, tmp_path / "other", world_size=3)
        shutil.copyfile(tmp_path / "other" / "__1_0.distcp", tmp_path / "c" / "__1_0.distcp")
        found = verify(tmp_path / "c", quick=True)
        assert {(p.code, p.file) for p in found.problems} == {("checksum", "__1_0.distcp")}
    else:
        ema_ckpt.consolidate(other, tmp_path / "other", max_shard_size=128)
        index = "model.safetensors.index.json"
        (tmp_path / "c" / index).write_text((tmp_path / "other" / index).read_text() + "\n")
        assert "stale-file" in [w.code for w in verify(tmp_path / "c", quick=True).warnings]


@pytest.mark.parametrize("name", sorted(DAMAGED))
def test_planted_damage_is_found_unless_it_lies_in_payload(name: str, fixtures: Path) -> None:
    found = verify(fixtures / "nasty" / name, quick=True)
    if name in PAYLOAD:
        assert (found.status, found.problems) == ("unproven", ())
        return
    assert found.status == "damaged"
    assert DAMAGED[name] in [(p.code, p.tensor, p.file) for p in found.problems]


@pytest.mark.parametrize("name", HONEST)
def test_honest_checkpoints_pass_and_nothing_counts_as_proven(name: str, fixtures: Path) -> None:
    found, whole = check(fixtures / name), verify(fixtures / name)
    status = "unproven" if found.unchecked_bytes else "sound"  # of nothing, everything was seen
    assert (found.quick, found.status, found.checked_bytes) == (True, status, 0)
    assert found.unchecked_bytes == whole.checked_bytes + whole.unchecked_bytes
    assert set(found.warnings) == {w for w in whole.warnings if w.code != "unchecked"}


def test_no_payload_is_read(tmp_path: Path) -> None:
    """Counted by the kernel: bytes that this process asked for."""
    torch.save({"model": {"w": torch.zeros(4_000_000)}}, tmp_path / "c.pt")
    path = save_dcp(tmp_path / "c", {"model": {f"t{i}": torch.zeros(1_000_000) for i in range(4)}})
    ema_ckpt.consolidate(path, tmp_path / "hf", max_shard_size="5MB")
    code = (
        "import sys, ema_ckpt\n"
        "def asked():\n"
        "    return int(open('/proc/self/io').read().split('rchar: ')[1].split()[0])\n"
        "ema_ckpt.check(sys.argv[1])\n"  # imports
        "before = asked(); ema_ckpt.check(sys.argv[1]); print(asked() - before)"
    )
    for name in ("c", "c.pt", "hf"):
        ended = subprocess.run(
            [sys.executable, "-c", code, tmp_path / name],
            capture_output=True, text=True, check=True, cwd=REPO,
        )  # fmt: skip
        assert int(ended.stdout) < 100_000, name


def test_a_newer_step_that_is_not_complete(tmp_path: Path) -> None:
    for step in (1, 2):
        save_dcp(tmp_path / f"step_{step}", state(1))
    os.truncate(tmp_path / "step_2" / "__0_0.distcp", 10)
    with pytest.raises(SourceError) as refused:
        check(tmp_path)
    assert refused.value.code == "truncated-file"


# ---------------------------------------------------------------- the function and the command


def test_check_returns_the_verdict_and_raises_the_first_problem(
    fixtures: Path, tmp_path: Path
) -> None:
    assert isinstance(check(fixtures / "dcp" / "fsdp2-w4"), GateResult)
    with pytest.raises(SourceError, match=r"__1_0\.distcp: no such file") as refused:
        check(fixtures / "nasty" / "missing-file")
    assert refused.value.code == "missing-file"
    with pytest.raises(SourceError) as absent:
        check(tmp_path / "absent")
    assert absent.value.code == "not-found"


def test_check_needs_no_torch(fixtures: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        f"import ema_ckpt; print(ema_ckpt.check({str(fixtures / 'dcp' / 'fsdp2-w4')!r}).status)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "unproven"


def test_check_reads_urls(fixtures: Path) -> None:
    memory = fsspec.filesystem("memory")
    for file in (fixtures / "nasty" / "base").iterdir():
        memory.pipe_file(f"/gate/{file.name}", file.read_bytes())
    try:
        assert (
            check("memory://gate").unchecked_bytes
            == check(fixtures / "nasty" / "base").unchecked_bytes
        )
        memory.rm_file("/gate/__1_0.distcp")
        with pytest.raises(SourceError) as refused:
            check("memory://gate")
        assert refused.value.code == "missing-file"
    finally:
        memory.rm("/gate", recursive=True)


@pytest.mark.parametrize(
    ("name", "code", "status"),
    [
        ("dcp/fsdp2-w4", 0, "unproven"),
        ("hf/sharded", 0, "unproven"),
        ("nasty/missing-file", 1, "damaged"),
        ("nasty/hostile-metadata", 1, "damaged"),
    ],
)
def test_exit_codes_and_json(name: str, code: int, status: str, fixtures: Path) -> None:
    ended = command(fixtures / name, "--quick", "--json")
    assert ended.returncode == code
    document = json.loads(ended.stdout)
    assert (document["status"], document["quick"], document["manifest"]) == (status, True, None)
    fields = "path resolved status checked_bytes unchecked_bytes problems warnings quick manifest"
    assert set(document) == set(fields.split())


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "ema_ckpt", "verify", *map(str, arguments)]
    return subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=False)


def test_a_missing_checkpoint_is_trouble_and_the_verdict_says_what_was_not_read(
    fixtures: Path, tmp_path: Path
) -> None:
    assert command(tmp_path / "absent", "--quick").returncode == 2
    ended = command(fixtures / "dcp" / "fsdp2-w4", "--quick")
    assert (
        "unproven: files, sizes, headers and settings are right; 3.61 kB of payload not read"
        in ended.stdout
    )


@pytest.mark.parametrize("options", [{"values": True}, {"against": "x"}])
def test_what_needs_payload_is_a_contradiction(options: dict[str, object], fixtures: Path) -> None:
    with pytest.raises(UsageError, match="--quick reads no payload"):
        verify(fixtures / "dcp" / "fsdp2-w4", quick=True, **options)  # type: ignore[arg-type]
