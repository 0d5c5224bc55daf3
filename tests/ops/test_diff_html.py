"""The page of a comparison: complete in itself, right in its numbers, and alive in a real browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ema_ckpt import TargetError, __version__, diff
from ema_ckpt.cli.commands import run
from tests.checkpoints import safetensors_at

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Page(HTMLParser):
    """Tags, attributes, table rows and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br", "wbr"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.rows and any(tag in ("td", "th") for tag in self.open):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def written(fixtures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    diff(fixtures / "tiny-lm", html=path)
    return path


def test_it_needs_nothing_else(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "object", "embed")]
    assert not [
        attrs for _, attrs in page.tags if attrs.keys() & {"src", "href", "srcset", "action"}
    ]
    assert "://" not in text.replace("http-equiv", "")
    assert "url(" not in text
    assert "@import" not in text
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")


def test_every_tensor_is_a_row_with_its_numbers(written: Path, fixtures: Path) -> None:
    result = diff(fixtures / "tiny-lm")
    rows = {row[0]: row for row in Page(written.read_text(encoding="utf-8")).rows[1:]}
    assert set(rows) == {entry.name for entry in result.tensors}
    for entry in result.tensors:
        assert rows[entry.name][1:3] == [f"{entry.rel_l2:.3g}", f"{entry.max_abs:.3g}"]
        assert rows[entry.name][7:] == [f"{entry.numel:,}"]  # no columns of NaN where there is none
    assert rows["lm_head.weight"][6] == "95 × 64"


def test_it_tells_what_it_was_made_of_and_by(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert ", num_updates 300, decay 0.98, dtype float32<br>" in text
    assert re.search(rf">ema_ckpt {re.escape(__version__)}, \d{{4}}-\d\d-\d\d \d\d:\d\d UTC<", text)


def test_charts_show_all_tensors(written: Path, fixtures: Path) -> None:
    text = written.read_text(encoding="utf-8")
    bars = re.findall(r'<rect class="bar".*?<title>(\d+) tensors?:', text, re.DOTALL)
    assert sum(map(int, bars)) == len(diff(fixtures / "tiny-lm").tensors)
    assert text.count('<polyline class="line') == 8
    assert text.count('<svg class="sample"') == 8
    assert "model.layers.*.mlp.up_proj.weight" in text
    assert "8 of 9 kinds of tensors are drawn" in text


def test_names_and_undefined_numbers_do_no_harm(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>\x07\"'&"
    save_file(
        {name: torch.tensor([1.0, float("nan")]), "x": torch.ones(2)}, tmp_path / "a.safetensors"
    )
    save_file({name: torch.ones(2), "y": torch.ones(2)}, tmp_path / "b.safetensors")
    diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", html=tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    page = Page(text)
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert page.rows[1][:2] == ["<script>alert(1)</script>\\x07\"'&", "–"]
    assert page.rows[0][-4:] == ["NaN a", "NaN b", "Inf a", "Inf b"]
    assert page.rows[1][6:] == ["2", "2", "1", "0", "0", "0"]
    assert "non-finite" in text
    assert "1 name only in b" in text


def test_names_that_are_no_text_are_escaped_in_charts_too(tmp_path: Path) -> None:
    names = ["\ud800.0.w", "\u202e.1.w", "\x1b[2J.2.w"]
    for file, more in (("a.pt", 0.0), ("b.pt", 0.5)):
        torch.save({name: torch.ones(2) + more for name in names}, tmp_path / file)
    diff(tmp_path / "a.pt", tmp_path / "b.pt", html=tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "\\ud800.0.w" in text
    assert "\u202e" not in text
    assert "\x1b" not in text


def test_nothing_to_compare_is_a_page_too(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"y": torch.ones(2)}, tmp_path / "b.safetensors")
    diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", html=tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert Page(text).rows[1:] == []
    assert re.findall("<dd>(.*?)</dd>", text) == ["–", "–", "–", "–", "0 of 0"]


def test_where_it_cannot_be_written(tmp_path: Path, fixtures: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match="--html"):
        diff(fixtures / "tiny-lm", html=tmp_path / "file" / "p.html")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_missing_directory_of_the_page_is_made(tmp_path: Path, fixtures: Path) -> None:
    diff(fixtures / "tiny-lm", html=tmp_path / "made" / "p.html")
    assert (tmp_path / "made" / "p.html").exists()


def test_it_never_replaces_what_is_compared(tmp_path: Path) -> None:
    folder, single = tmp_path / "a", safetensors_at(tmp_path / "b.safetensors", 1.0)
    safetensors_at(folder / "model.safetensors")
    shutil.move(folder / "model.safetensors", tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    (tmp_path / "link.html").symlink_to(single)
    before = {path: path.read_bytes() for path in (single, tmp_path / "blob")}
    for name in (
        "b.safetensors",
        "b.safetensors/p.html",
        "link.html",
        "blob",
        "a/model.safetensors",
        "a/p.html",
        "a",
    ):
        with pytest.raises(TargetError, match="--html") as caught:
            diff(folder, single, html=tmp_path / name)
        assert caught.value.code == "target-is-source"
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(TargetError):
        run(["diff", str(folder), str(single), "--html", str(single)])
    assert single.read_bytes() == before[single]


def test_only_regular_files_are_replaced_and_links_stay(tmp_path: Path) -> None:
    sides = (
        safetensors_at(tmp_path / "a.safetensors"),
        safetensors_at(tmp_path / "b.safetensors", 1.0),
    )
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "to-fifo").symlink_to("fifo")
    for name in ("fifo", "folder", "loop", "to-fifo"):
        with pytest.raises(TargetError, match="not a regular file") as caught:
            diff(*sides, html=tmp_path / name)
        assert caught.value.code == "usage"
    assert (tmp_path / "fifo").is_fifo()
    (tmp_path / "old.html").write_text("old", encoding="utf-8")
    for link, target in (("page.html", "old.html"), ("new.html", "absent.html")):
        (tmp_path / link).symlink_to(target)
        diff(*sides, html=tmp_path / link)
        assert (tmp_path / link).is_symlink()
        assert (tmp_path / target).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_is_no_page_is_not_replaced(tmp_path: Path) -> None:
    """Who takes `--html` for a flag names a checkpoint as the place of the page."""
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    for place in (old, new):
        average = {"weights": {"w": torch.ones(2)}, "num_updates": 1}
        torch.save({"model": {"w": torch.zeros(2)}, "ema": average}, place)
    notes = tmp_path / "notes.txt"
    notes.write_text("mine", encoding="utf-8")
    before = old.read_bytes(), notes.read_bytes()
    for place in (old, notes):
        with pytest.raises(TargetError, match="no HTML page") as caught:
            run(["diff", "--html", str(place), str(new)])
        assert caught.value.code == "target-exists"
    assert (old.read_bytes(), notes.read_bytes()) == before
    for name, content in (("empty", ""), ("page", "\n<!DOCTYPE HTML><title>old</title>")):
        (tmp_path / name).write_text(content, encoding="utf-8")
        diff(new, html=tmp_path / name)
        assert "cosine" in (tmp_path / name).read_text(encoding="utf-8")


def test_a_place_that_is_refused_costs_no_comparison(tmp_path: Path) -> None:
    sides = (
        safetensors_at(tmp_path / "a.safetensors"),
        safetensors_at(tmp_path / "b.safetensors", 1.0),
    )
    os.mkfifo(tmp_path / "fifo")
    read: list[int] = []
    with pytest.raises(TargetError):
        diff(*sides, html=tmp_path / "fifo", progress=read.append)
    assert not read


def test_a_place_that_is_taken_meanwhile_is_refused(tmp_path: Path) -> None:
    sides = (
        safetensors_at(tmp_path / "a.safetensors"),
        safetensors_at(tmp_path / "b.safetensors", 1.0),
    )
    place = tmp_path / "p.html"

    def take(_: int) -> None:
        if not place.exists():
            os.mkfifo(place)

    with pytest.raises(TargetError, match="not a regular file"):
        diff(*sides, html=place, progress=take)
    assert place.is_fifo()


_PROBE = """<script>
const names = () => [...document.querySelectorAll("#tensors tbody tr")].filter(r => !r.hidden).map(r => r.cells[0].textContent);
const log = [];
const buttons = document.querySelectorAll("#tensors button");
log.push(["start", names()]);
buttons[0].click(); log.push(["name up", names()]);
buttons[0].click(); log.push(["name down", names()]);
buttons[7].click(); log.push(["elements", [...document.querySelectorAll("#tensors tbody tr")].map(r => r.cells[7].dataset.value)]);
const field = document.querySelector("#filter");
field.value = "LM_HEAD"; field.dispatchEvent(new Event("input")); log.push(["filter", names()]);
const chart = document.querySelector("svg").getBoundingClientRect();
log.push(["chart", [chart.width, chart.height]]);
document.title = JSON.stringify(log);
</script></html>"""


@pytest.mark.slow
def test_sorting_and_filtering_in_a_browser(written: Path, fixtures: Path, tmp_path: Path) -> None:
    """In headless Chromium, which has to be installed: `apt-get install chromium`."""
    import html
    import json

    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert browser is not None, "this test needs a browser: apt-get install chromium"
    probe = tmp_path / "probe.html"
    probe.write_text(
        written.read_text(encoding="utf-8").replace("</html>", _PROBE), encoding="utf-8"
    )
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --virtual-time-budget=5000 --dump-dom"
    )
    command = [browser, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", probe.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    log = dict(
        json.loads(html.unescape(re.search(r"<title>(.*?)</title>", ended.stdout, re.DOTALL)[1]))
    )
    tensors = diff(fixtures / "tiny-lm").tensors
    names = sorted(entry.name for entry in tensors)
    assert log["start"] == [e.name for e in sorted(tensors, key=lambda e: -e.rel_l2)]
    assert log["name up"] == names
    assert log["name down"] == names[::-1]
    assert log["elements"] == [
        str(n) for n in sorted((entry.numel for entry in tensors), reverse=True)
    ]
    assert log["filter"] == ["lm_head.weight"]
    assert log["chart"][0] > 300
    assert log["chart"][1] > 100
