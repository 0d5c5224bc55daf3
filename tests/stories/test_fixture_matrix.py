"""Every committed checkpoint under every verb: it ends as the table says, what it writes is the truth, and
nothing changed since the golden record was taken.

The tables are those of `fixtures/README.md`. That nothing is executed, that an error is one line and leaves
nothing, is asked of every run in `tests/stories/cells.py`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open

from tests.stories import golden, truth
from tests.stories.cells import CELLS, FORMS, Cell, Run, Runs, fixtures
from tests.stories.commands import FIXTURES, environment

RECORD = golden.load()
COLUMN = {"consolidate-pt": "consolidate", "reshard-2": "reshard", "convert-pt": "convert"}


class Row(NamedTuple):
    """One row: {verb: (exit code, codes)}, and what an error of consolidate has to name."""

    cells: dict[str, tuple[int, list[str]]]
    names: str


def _table() -> dict[str, Row]:
    rows, verbs = {}, []
    for line in (FIXTURES / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[0] == "fixture":
            verbs = cells[1 : cells.index("names")]
        elif verbs and len(cells) == len(verbs) + 3 and cells[1][:1].isdigit():
            ends = {
                verb: (int(text[0]), text.split()[1:])
                for verb, text in zip(verbs, cells[1:], strict=False)
            }
            rows[cells[0].strip("`")] = Row(ends, cells[-2].strip("`"))
    return rows


TABLE = _table()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    served = Runs(tmp_path_factory.mktemp("runs"))
    yield served
    served.commands.close()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_it_ends_as_the_table_says_with_the_truth_and_as_recorded(cell: Cell, runs: Runs) -> None:
    run = runs.of(cell)
    _check_table(run)
    _check_truth(run, runs)
    complaint = golden.complaint(str(cell), RECORD.get(str(cell), {}), golden.entry(run, runs))
    if complaint:
        pytest.fail(complaint, pytrace=False)


def _check_table(run: Run) -> None:
    form = run.cell.form
    row, column = TABLE.get(run.cell.fixture), COLUMN.get(form, form)
    if row is None or run.cell.tree is not None or column not in row.cells:
        return
    assert (run.ended.code, _codes(run.ended.document)) == row.cells[column], run.ended.stderr
    assert form != "consolidate-pt" or row.names in run.ended.stderr


def _codes(document: dict) -> list[str]:
    if "error" in document:
        return [document["error"]["code"]]
    told = (
        item for part in ("problems", "warnings", "findings") for item in document.get(part, ())
    )
    return sorted({item["code"] for item in told})


def _check_truth(run: Run, runs: Runs) -> None:
    fixture, form = run.cell.fixture, run.cell.form
    check = CHECKS.get(form) or CHECKS.get(FORMS[form][0])
    if fixture in truth.EXPECTED:
        if check and fixture not in truth.REFUSED:
            check(run, runs)
    elif fixture.startswith("nasty/") and form == "consolidate-pt" and run.ended.code == 0:
        _check_unharmed(run)


def _check_unharmed(run: Run) -> None:
    """A harmless oddity, or hostility in a part that nobody asked for, does not change a bit of the weights."""
    found = truth.load(run.out)
    if run.cell.fixture.endswith(".pt"):
        assert torch.equal(found["a"], torch.arange(6.0).reshape(2, 3))
    else:
        assert truth.facts_of(found) == truth.trees("nasty/base")["ema"]


def _check_inspected(run: Run, runs: Runs) -> None:
    found = {
        tensor["name"]: (tensor["shape"], tensor["dtype"])
        for tensor in run.ended.document["tensors"]
    }
    assert found == {name: fact[:2] for name, fact in truth.whole(run.cell.fixture).items()}


def _check_consolidated(run: Run, runs: Runs) -> None:
    fixture, document = run.cell.fixture, run.ended.document
    trees = truth.trees(fixture)
    if run.cell.tree is None and len(trees) > 1 and "error" in document:
        assert document["error"]["code"] == "unknown-tree"
        return
    tensors = trees[run.cell.tree] if run.cell.tree is not None else _default(trees, document)
    if run.out.suffix != ".pt" and not truth.fits_safetensors(tensors):
        assert document["error"]["code"] == "unsupported"
        assert any(repr(name) in run.ended.stderr for name in tensors)
        return
    tied = truth.TIES.get(fixture, {}) | truth.RECORDED.get(fixture, {})
    if run.out.suffix == ".safetensors":
        _check_ties(run, tied)
        tensors = {name: fact for name, fact in tensors.items() if name not in tied}
    elif not run.out.suffix:  # all ties written out
        tensors = tensors | {
            name: tensors[kept] for name, kept in truth.RECORDED.get(fixture, {}).items()
        }
    assert truth.facts_of(truth.load(run.out)) == tensors


def _default(trees: dict[str, dict[str, truth.Fact]], document: dict) -> dict[str, truth.Fact]:
    """The tree that the command took where none was named: the only one, or the one that it says."""
    return trees[document["tree"]] if len(trees) > 1 else next(iter(trees.values()), {})


def _check_ties(run: Run, tied: dict[str, str]) -> None:
    assert run.ended.document["ties"] == tied
    with safe_open(run.out, "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert {alias: file.metadata()[alias] for alias in tied} == tied


def _check_dcp(run: Run, runs: Runs) -> None:
    assert truth.facts_of(truth.load(run.out)) == truth.whole(run.cell.fixture)


def _check_safetensors(run: Run, runs: Runs) -> None:
    loaded = truth.load(run.out)
    again = {name: loaded[kept] for name, kept in truth.TIES.get(run.cell.fixture, {}).items()}
    fitting = {
        n: fact
        for n, fact in truth.whole(run.cell.fixture).items()
        if truth.fits_safetensors({n: fact})
    }
    assert truth.facts_of(loaded | again) == fitting


def _check_torch(run: Run, runs: Runs) -> None:
    facts, paths = truth.whole(run.cell.fixture), truth.paths(run.cell.fixture)
    wanted = {paths[name]: fact for name, fact in facts.items()}
    assert truth.facts_of(dict(truth.leaves(truth.load(run.out)))) == wanted


def _check_cast(run: Run, runs: Runs) -> None:
    """A cast on the way is torch's own."""
    plain = truth.load(runs.of(Cell(run.cell.fixture, "convert-pt")).out)
    wanted = {
        path: t.to(torch.bfloat16) if _is_cast(path, t) else t for path, t in truth.leaves(plain)
    }
    assert truth.facts_of(dict(truth.leaves(truth.load(run.out)))) == truth.facts_of(wanted)


def _is_cast(path: tuple[str | int, ...], tensor: torch.Tensor) -> bool:
    return path[0] != "optimizer" and tensor.dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
    )


def _check_back(run: Run, runs: Runs) -> None:
    """Nesting and plain objects survive both formats."""
    straight = runs.of(Cell(run.cell.fixture, "convert-pt"))
    assert truth.shape_of(truth.load(run.out)) == truth.shape_of(truth.load(straight.out))


CHECKS = {
    "inspect": _check_inspected,
    "consolidate": _check_consolidated,
    "reshard": _check_dcp,
    "convert-dcp": _check_dcp,
    "convert-safetensors": _check_safetensors,
    "convert-pt": _check_torch,
    "convert-bf16": _check_cast,
    "convert-back": _check_back,
}


@pytest.mark.parametrize("name", ["hostile-metadata", "hostile-object-item", "hostile.pt"])
@pytest.mark.parametrize("verb", ["inspect", "consolidate"])
def test_the_installed_command_executes_nothing(name: str, verb: str, tmp_path: Path) -> None:
    """The whole process as a user starts it."""
    target = [tmp_path / "out.pt"] if verb == "consolidate" else []
    command = [sys.executable, "-P", "-m", "ema_ckpt", verb, FIXTURES / "nasty" / name, *target]
    env = environment(EMA_CKPT_MARKER=str(tmp_path / "marker"))
    subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)
    assert not (tmp_path / "marker").exists()


def test_public_names_are_as_recorded() -> None:
    recorded = {key: text for key, text in RECORD.items() if key.startswith("ema_ckpt.")}
    changed = "\n".join(golden.differences(recorded, golden.public_names()))
    if changed:
        pytest.fail(f"Public names are not as recorded:\n{changed}", pytrace=False)


def test_every_cell_is_recorded_and_every_record_has_its_cell() -> None:
    assert {key for key in RECORD if not key.startswith("ema_ckpt.")} == {
        str(cell) for cell in CELLS
    }


def test_every_odd_and_nasty_fixture_has_a_row() -> None:
    assert sorted(TABLE) == sorted(
        name for name in fixtures() if name.startswith(("odd/", "nasty/"))
    )


def test_every_kind_of_checkpoint_is_in_the_truth() -> None:
    known = [name for name in truth.EXPECTED if name not in truth.REFUSED]
    # The truth of quantised weights is their values, in fixtures/quantized.json.
    assert {name.partition("/")[0] for name in known} | {"quantized"} == {
        name.partition("/")[0] for name in fixtures()
    }
    assert {truth.EXPECTED[name]["world_size"] for name in known if name.startswith("dcp/")} == {
        1,
        2,
        4,
        8,
    }


def test_committed_fixtures_stay_small() -> None:
    found = [
        path for path in FIXTURES.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    sizes = [path.lstat().st_size for path in found]
    assert sum(sizes) < 8_000_000
    assert max(sizes) < 1_400_000
