"""Files behind a web server: what is read, and what is said of a server that fails. The server is a real one."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ema_ckpt
from ema_ckpt.core.errors import AccessError, SourceError
from ema_ckpt.storage import files, remote
from ema_ckpt.storage.directories import base_name, join, list_folder, parent_of
from ema_ckpt.storage.files import open_files
from tests.storage.http_server import Handler, Server, serving

pytest.importorskip("aiohttp")
DATA = bytes(range(256)) * 40
EMA_OFFSET = 21465  # of 48 bytes of `ema.weights.down.weight` in __1_0.distcp
DCP, ONE_FILE = "dcp/fsdp2-w2", "safetensors/dtypes.safetensors"
RANKS, SHARDED = "rank-files/replicas", "hf/sharded"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(DATA)
    (tmp_path / "sub" / "b").write_bytes(DATA)
    with serving(tmp_path) as running:
        yield running


@pytest.fixture
def checkpoints(fixtures: Path) -> Iterator[Server]:
    with serving(fixtures) as running:
        yield running


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_READ_PATIENCE", remote.Patience((0.01, 0.01, 0.01), 5.0))


def data_files(handler: Handler) -> bool:
    return "distcp" in handler.path or "safetensors" in handler.path.rpartition("/")[2]


def test_ranges_and_folders_are_read(server: Server) -> None:
    source = open_files(server.url())
    assert (source.size("a"), source.read("a", 300, 20)) == (len(DATA), DATA[300:320])
    folder = list_folder(server.url())
    assert (folder.folders, folder.files) == (("sub",), ("a",))
    with pytest.raises(SourceError) as caught:
        source.size("none")
    assert caught.value.code == "missing-file"


@pytest.mark.parametrize("path", [DCP, f"{DCP}/", "hf/sharded", ONE_FILE])
def test_a_verdict_is_the_same_behind_a_server(
    checkpoints: Server, fixtures: Path, path: str
) -> None:
    local, served = ema_ckpt.verify(fixtures / path), ema_ckpt.verify(checkpoints.url(path))
    assert (served.status, served.checked_bytes) == (local.status, local.checked_bytes)


def test_metadata_that_a_page_does_not_list_is_found(
    checkpoints: Server, fixtures: Path, tmp_path: Path
) -> None:
    checkpoints.lists_hidden = False
    assert list_folder(checkpoints.url(DCP)).files == (
        ".metadata", "__0_0.distcp", "__1_0.distcp",
    )  # fmt: skip
    assert ema_ckpt.verify(checkpoints.url(DCP)).status == "sound"
    shutil.copytree(fixtures / DCP, tmp_path / "c")
    (tmp_path / "c" / ".metadata").unlink()
    with serving(tmp_path) as server:
        server.lists_hidden = False
        found = ema_ckpt.verify(server.url("c"))
    assert [problem.code for problem in found.problems] == ["missing-metadata"]


@pytest.mark.parametrize("path", [DCP, ONE_FILE])
def test_a_server_that_ignores_ranges_is_no_damage(checkpoints: Server, path: str) -> None:
    checkpoints.honours_ranges = False
    with pytest.raises(AccessError, match="range requests") as caught:
        ema_ckpt.verify(checkpoints.url(path))
    assert caught.value.code == "unreadable"


FAULTS = {
    "500": (lambda handler: answer(handler, 500), 4),
    "503": (lambda handler: answer(handler, 503), 4),
    "429": (lambda handler: answer(handler, 429), 4),
    "403": (lambda handler: answer(handler, 403), 1),
    "401": (lambda handler: answer(handler, 401), 1),
    "reset": (lambda handler: handler.reset(), 4),
    "cut short": (lambda handler: handler.cut_short(), 4),
    "too long": (lambda handler: answer(handler, 206, b"x" * 9), 4),
}


def part(handler: Handler, said: str | None, body: bytes = DATA[10:15], **headers: str) -> bool:
    """Answer 206 with a header `Content-Range`, if any is said."""
    ranges = {} if said is None else {"Content-Range": said}
    kind = headers.pop("kind", "application/octet-stream")
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    handler.answer(206, body, kind, ranges | named)
    return True


RIGHT = f"bytes 10-14/{len(DATA)}"
# What a server says of bytes 10 to 14, and words of the message.
UNBELIEVABLE = {
    "other bytes": (lambda h: part(h, f"bytes 20-24/{len(DATA)}"), "asked for bytes 10-14"),
    "fewer bytes": (lambda h: part(h, f"bytes 10-12/{len(DATA)}", b"xxx"), "asked for"),
    "no range named": (lambda h: part(h, None), "asked for"),
    "several parts": (
        lambda h: part(h, None, b"--a\r\n\r\nxx--a--", kind="multipart/byteranges; boundary=a"),
        "asked for",
    ),
    "compressed": (
        lambda h: part(h, RIGHT, gzip.compress(DATA[10:15]), Content_Encoding="gzip"),
        "'gzip' data",
    ),
    "a longer body": (lambda h: part(h, RIGHT, DATA[10:20]), "sent 6 of 5 bytes"),
    "a shorter body": (lambda h: part(h, RIGHT, DATA[10:12]), "sent 2 of 5 bytes"),
    "no such range": (lambda h: answer(h, 416), "no bytes 10 to 15"),
}


@pytest.mark.parametrize("name", UNBELIEVABLE)
def test_an_answer_to_another_question_is_not_believed(server: Server, name: str) -> None:
    fault, words = UNBELIEVABLE[name]
    source = open_files(server.url())
    assert source.size("a") == len(DATA)
    server.fault = fault
    with pytest.raises(AccessError, match="asked 4 times") as caught:
        source.read("a", 10, 5)
    assert (caught.value.code, words in str(caught.value)) == ("unreadable", True), caught.value
    server.fault = lambda handler: False
    assert source.read("a", 10, 5) == DATA[10:15]


@pytest.mark.parametrize("verb", [ema_ckpt.verify, ema_ckpt.inspect, ema_ckpt.diff])
def test_other_bytes_of_the_right_length_are_no_damage(
    checkpoints: Server, fixtures: Path, verb: Callable[[str], object]
) -> None:
    """A cache before the server mixes up ranges: the checksums are wrong, but not the file's."""

    def shifted(handler: Handler) -> bool:
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        if span is None or not data_files(handler):
            return False
        data = (fixtures / handler.path.strip("/")).read_bytes()
        length = int(span[2]) - int(span[1]) + 1
        return part(handler, f"bytes 0-{length - 1}/{len(data)}", data[:length])

    checkpoints.fault = shifted
    with pytest.raises(AccessError, match="asked for bytes") as caught:
        verb(checkpoints.url(DCP))
    assert caught.value.code == "unreadable"


@pytest.mark.parametrize("sends_tags", [True, False])
@pytest.mark.parametrize("verb", ["verify", "diff", "consolidate"])
def test_a_file_that_is_replaced_meanwhile_is_a_change_and_no_damage(
    fixtures: Path, tmp_path: Path, verb: str, sends_tags: bool
) -> None:
    """Other values, in a file of the same length, come with the third range that is asked for."""
    shutil.copytree(fixtures / DCP, tmp_path / "run")
    file = tmp_path / "run" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[EMA_OFFSET : EMA_OFFSET + 48] = bytes(48)
    ranges = 0

    def replaced(handler: Handler) -> bool:
        nonlocal ranges
        if file.name in handler.path and "Range" in handler.headers:
            ranges += 1
            if ranges == 3:
                file.write_bytes(data)
        return False

    with serving(tmp_path) as running:
        running.sends_tags, running.sends_times = sends_tags, not sends_tags
        running.fault = replaced
        out = (tmp_path / "out.safetensors",) if verb == "consolidate" else ()
        with pytest.raises((AccessError, SourceError)) as caught:
            getattr(ema_ckpt, verb)(running.url("run"), *out)
    assert ranges >= 3
    assert caught.value.code == "source-changed", caught.value
    assert file.name in str(caught.value)
    assert os.listdir(tmp_path) == ["run"]
    assert {problem.code for problem in ema_ckpt.verify(tmp_path / "run").problems} == {"checksum"}


def test_a_replaced_file_of_another_length_is_a_change(server: Server) -> None:
    server.sends_tags = False
    source = open_files(server.url())
    assert source.size("a") == len(DATA)
    (server.root / "a").write_bytes(DATA + b"more")
    for start in (0, 10):
        for server.honours_ranges in (True, False):
            with pytest.raises(AccessError) as caught:
                source.read("a", start, 5)
            is_known = server.honours_ranges or not start
            assert caught.value.code == ("source-changed" if is_known else "unreadable")


def test_what_is_open_is_one_file_by_whatever_the_server_says_of_it(server: Server) -> None:
    """Old and new tensors came from one handle where there was a time alone, or a weak tag."""
    path = server.root / "a"
    for tells in ("time", "weak tag", "both", "tag of GET"):
        server.sends_tags, server.sends_times = tells != "time", tells in ("time", "both")
        server.weakens_tags = tells in ("weak tag", "both")
        if tells == "tag of GET":
            server.fault = _head_without_tag
        path.write_bytes(DATA)
        source = open_files(server.url())
        assert source.read("a", 0, 5) == source.read("a", 0, 5) == DATA[:5]
        path.write_bytes(DATA[::-1])
        for _ in range(2):
            with pytest.raises(AccessError, match="was replaced") as caught:
                source.read("a", 10, 5)
            assert caught.value.code == "source-changed"
        assert open_files(server.url()).read("a", 10, 5) == DATA[::-1][10:15]


def _head_without_tag(handler: Handler) -> bool:
    if handler.command != "HEAD":
        return False
    handler.answer(200, DATA, "application/octet-stream", {"Accept-Ranges": "bytes"})
    return True


def test_a_weak_tag_of_head_alone_or_of_an_error_page_is_no_change(server: Server) -> None:
    """Programs make tags of what they send; that of HEAD is of nothing, that of a page of a page."""

    def fault(handler: Handler) -> bool:
        nonlocal errors
        headers = {"ETag": 'W/"page"', "Last-Modified": "now"}
        if handler.command == "HEAD":
            handler.answer(200, DATA, "application/octet-stream", headers)
            return True
        if errors:
            errors -= 1
            handler.answer(503, b"busy", "text/html", headers)
            return True
        return False

    errors = 1
    server.fault, server.weakens_tags, server.sends_times = fault, True, True
    source = open_files(server.url())
    assert source.size("a") == len(DATA)
    for start in (0, 10):
        errors = 1
        assert source.read("a", start, 5) == DATA[start : start + 5]


def test_redirects_are_followed_and_loops_are_not(checkpoints: Server, fixtures: Path) -> None:
    def moved(handler: Handler) -> bool:
        if handler.path.startswith("/there/"):
            handler.path = handler.path.removeprefix("/there")
            return False
        to = f"/there{handler.path}" if "distcp" in handler.path else ""
        if "ring" in handler.path:
            to = handler.path
        return bool(to) and answer(handler, 302, headers={"Location": to})

    checkpoints.fault = moved
    assert ema_ckpt.verify(checkpoints.url(DCP)).status == "sound"
    with pytest.raises(AccessError) as caught:
        ema_ckpt.verify(checkpoints.url("ring"))
    assert caught.value.code == "unreadable" and "redirects on and on" in str(caught.value)


def answer(
    handler: Handler, status: int, body: bytes = b"no", headers: dict[str, str] | None = None
) -> bool:
    handler.answer(status, body, "text/plain", headers)
    return True


@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_server_is_named_without_credentials(server: Server, name: str) -> None:
    fault, tries = FAULTS[name]
    source = open_files(server.url("", "me:secret@"))
    assert source.size("a") == len(DATA)
    server.requests.clear()
    server.fault = fault
    with pytest.raises(AccessError) as caught:
        source.read("a", 10, 5)
    message = str(caught.value)
    assert (caught.value.code, caught.value.file) == ("unreadable", "a")
    assert message.startswith("a: ") and f"http://***@127.0.0.1:{server.server_port}" in message
    assert "secret" not in message
    assert len(server.requests) >= tries  # aiohttp itself tries once more after a reset
    assert (f"asked {tries} times" in message) == (tries > 1)


@pytest.mark.parametrize("verb", [ema_ckpt.inspect, ema_ckpt.verify, ema_ckpt.latest])
def test_a_server_without_any_answer_is_no_empty_place(server: Server, verb: object) -> None:
    server.fault = lambda handler: answer(handler, 500)
    with pytest.raises(AccessError, match=r"500 .*asked 4 times"):
        verb(server.url("sub"))


def test_a_server_that_recovers_is_asked_again(checkpoints: Server) -> None:
    """Whatever is asked fails the first time; several workers ask at once."""
    asked: set[tuple[str, str, str | None]] = set()

    def fails_at_first(handler: Handler) -> bool:
        request = handler.command, handler.path, handler.headers.get("Range")
        is_first = request not in asked
        asked.add(request)
        return is_first and answer(handler, 503)

    checkpoints.fault = fails_at_first
    assert ema_ckpt.verify(checkpoints.url(DCP)).status == "sound"
    assert len(asked) > 5


def test_a_file_that_vanishes_meanwhile_is_a_change_and_no_damage(server: Server) -> None:
    source = open_files(server.url())
    source.size("a")
    (server.root / "a").unlink()
    with pytest.raises(AccessError) as caught:
        source.read("a", 0, 10)
    assert caught.value.code == "source-changed"


@pytest.mark.parametrize("asked", ["HEAD", "GET", "body"])
def test_a_server_that_falls_silent_is_given_up(
    asked: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten minutes went by without a word where a connection had broken and nobody had closed it."""
    http = pytest.importorskip("fsspec.implementations.http").HTTPFileSystem
    monkeypatch.setattr(remote, "_HTTP_SILENCE_SECONDS", 0.3)
    http.clear_instance_cache()
    is_over = threading.Event()

    def fault(handler: Handler) -> bool:
        if asked != "HEAD" and (handler.command == "HEAD" or "Range" not in handler.headers):
            return False
        if asked == "body":
            handler.send_response(206)
            handler.send_header("Content-Length", "20")
            handler.send_header("Content-Range", f"bytes 300-319/{len(DATA)}")
            handler.end_headers()
            handler.wfile.write(b"x")
            handler.wfile.flush()
        is_over.wait(30)
        handler.close_connection = True
        return True

    try:
        source = open_files(server.url())
        if asked == "body":
            assert source.size("a") == len(DATA)
        server.fault = fault
        begin = time.monotonic()
        with pytest.raises(AccessError) as caught:
            source.read("a", 300, 20)
        assert time.monotonic() - begin < 10
        assert caught.value.code == "unreadable"
    finally:
        is_over.set()
        http.clear_instance_cache()


@pytest.mark.parametrize("options", [{"client_kwargs": {"timeout": 1}}, {"timeout": 1}])
def test_timeouts_that_somebody_has_set_stay(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    http = pytest.importorskip("fsspec.implementations.http").HTTPFileSystem
    monkeypatch.setitem(pytest.importorskip("fsspec.config").conf, "http", options)
    assert remote.open_filesystem("http://host/a")[0].kwargs.get("timeout") == options.get(
        "timeout"
    )
    http.clear_instance_cache()


def test_what_else_this_process_reads_from_the_web_keeps_its_own_timeouts(server: Server) -> None:
    fsspec = pytest.importorskip("fsspec")
    others = fsspec.filesystem("http")
    assert open_files(server.url()).size("a") == len(DATA)
    assert "timeout" not in others.kwargs
    assert "timeout" in remote.open_filesystem(server.url())[0].kwargs


def test_a_long_read_is_many_requests(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of a gigabyte does not come over a slow line within the time that one answer has."""
    monkeypatch.setattr(files, "_HTTP_NBYTES", 1000)
    ranges: list[str] = []

    def fault(handler: Handler) -> bool:
        ranges.append(handler.headers.get("Range", ""))
        return False

    source = open_files(server.url())
    assert source.size("a") == len(DATA)
    server.fault = fault
    buffer = bytearray(2500)
    source.read_into("a", 300, memoryview(buffer))
    assert buffer == DATA[300:2800]
    assert ranges == ["bytes=300-1299", "bytes=1300-2299", "bytes=2300-2799"]


def test_a_host_that_refuses_connections(tmp_path: Path) -> None:
    with serving(tmp_path) as gone:
        url = gone.url("run", "token@")
    with pytest.raises(AccessError) as caught:
        ema_ckpt.verify(url)
    assert "token" not in str(caught.value)


def test_a_signed_url_goes_with_the_directory_and_is_never_shown(
    checkpoints: Server, tmp_path: Path
) -> None:
    def only_signed(handler: Handler) -> bool:
        is_allowed = handler.path.endswith("?X-Signature=s/e/c") and "json" not in handler.path
        return not is_allowed and answer(handler, 403)

    checkpoints.fault = only_signed
    url = checkpoints.url(f"{ONE_FILE}?X-Signature=s/e/c")
    assert join(parent_of(url), base_name(url)) == url
    results = [ema_ckpt.inspect(url), ema_ckpt.verify(url)]
    out = tmp_path / "out.safetensors"
    results.append(ema_ckpt.convert(url, out))
    for result in results:
        assert "s/e/c" not in str(result)
        assert "X-Signature=***" in result.resolved
    assert {chunk.file for t in results[0].tensors for chunk in t.chunks} == {"dtypes.safetensors"}
    # What the server does not allow to look at is said, for it may hold checksums.
    assert any("ema_ckpt.json" in warning.message for warning in results[1].warnings)


def test_damage_behind_a_server_is_still_damage(tmp_path: Path, fixtures: Path) -> None:
    shutil.copytree(fixtures / DCP, tmp_path / "run")
    file = tmp_path / "run" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    with serving(tmp_path) as running:
        result = ema_ckpt.verify(running.url("run"))
    assert result.status == "damaged"
    assert {problem.code for problem in result.problems} >= {"truncated-file"}
    assert json.loads(json.dumps(result.path)).startswith("http://")


def head_says(handler: Handler, error: int | None) -> bool:
    """Answer HEAD with a length so many bytes too long; with 0, as without a body, for None."""
    file = handler.server.root / handler.path.partition("?")[0].strip("/")
    if handler.command != "HEAD" or not file.is_file():
        return False
    handler.send_response(200)
    length = 0 if error is None else file.stat().st_size + error
    handler.send_header("Content-Length", str(length))
    handler.end_headers()
    return True


@pytest.mark.parametrize("error", [None, 8, -8])
@pytest.mark.parametrize("path", [DCP, ONE_FILE])
def test_a_server_whose_head_has_another_length_is_no_damage(
    checkpoints: Server, tmp_path: Path, path: str, error: int | None
) -> None:
    """Programs that make their answers often give HEAD the length of its own body."""
    checkpoints.fault = lambda handler: head_says(handler, error)
    checkpoints.honours_ranges = error is not None  # else the total of a range counts
    for verb in (ema_ckpt.verify, ema_ckpt.inspect, ema_ckpt.consolidate):
        out = [str(tmp_path / "out.safetensors")] if verb is ema_ckpt.consolidate else []
        with pytest.raises(AccessError, match="in its answer to HEAD") as caught:
            verb(checkpoints.url(path), *out)
        assert caught.value.code == "unreadable"


def test_an_empty_file_behind_a_server_is_still_damage(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")
    with serving(tmp_path) as running:
        assert ema_ckpt.verify(running.url("a.safetensors")).status == "damaged"


def test_names_on_a_page_behind_a_query_are_read(checkpoints: Server) -> None:
    url = checkpoints.url(f"{DCP}?token=sesame")
    result = ema_ckpt.verify(url)
    assert result.status == "sound" and "sesame" not in str(result)


def test_a_traceback_hides_what_redirects_and_addresses_have_of_secrets(
    checkpoints: Server,
) -> None:
    def elsewhere(handler: Handler) -> bool:
        if "signature" in handler.path:
            return answer(handler, 500)
        to = f"http://127.0.0.1:{checkpoints.server_port}/there?signature=sesame"
        return answer(handler, 302, headers={"Location": to})

    checkpoints.fault = elsewhere
    words = ["verify", checkpoints.url(DCP, "me:sesame@"), "--debug"]
    ended = subprocess.run(
        [sys.executable, "-m", "ema_ckpt", *words], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "Traceback" in ended.stderr and "signature=***" in ended.stderr
    assert "sesame" not in ended.stderr + ended.stdout


def apache_pages(handler: Handler, query: str = "", *, must_have: str = "") -> bool:
    """Pages with links that sort them, as Apache's mod_autoindex has, and `query` behind names."""
    if must_have and must_have not in handler.path.partition("?")[2]:
        return answer(handler, 403)
    folder = handler.server.root / handler.path.partition("?")[0].strip("/")
    if not folder.is_dir():
        return False
    names = sorted(f"{p.name}/" if p.is_dir() else p.name for p in folder.iterdir())
    links = ["?C=N;O=D", "?C=M;O=A", "?C=S;O=A", "../", "./", *(f"{n}{query}" for n in names)]
    page = "".join(f'<a href="{link}">x</a>\n' for link in links)
    handler.answer(200, f"<html>{page}</html>".encode(), "text/html")
    return True


@pytest.mark.parametrize("asked", ["", "?token=sesame"])
@pytest.mark.parametrize("query", ["", "?download=1", "?token=sesame"])
def test_queries_of_links_are_no_part_of_names(
    checkpoints: Server, server: Server, fixtures: Path, query: str, asked: str
) -> None:
    for running in (checkpoints, server):
        running.fault = lambda handler: apache_pages(handler, query, must_have=asked[1:])
    folder = list_folder(server.url(asked))
    assert (folder.folders, folder.files) == (("sub",), ("a",))
    assert open_files(server.url(asked)).listing() == ["a", "sub"]
    for path in (DCP, "hf/sharded"):
        served = ema_ckpt.verify(checkpoints.url(f"{path}{asked}"))
        local = ema_ckpt.verify(fixtures / path)
        assert (served.status, served.checked_bytes) == (local.status, local.checked_bytes)
        codes = [warning.code for warning in served.warnings]
        assert codes == [warning.code for warning in local.warnings]


def test_what_lies_beside_a_file_is_listed_with_the_query_and_what_pages_hide(
    checkpoints: Server,
) -> None:
    checkpoints.lists_hidden = False
    checkpoints.fault = lambda handler: "t=abc" not in handler.path and answer(handler, 403)
    for url in (checkpoints.url(f"{DCP}?t=abc"), checkpoints.url(f"{DCP}/?t=abc")):
        assert open_files(url).listing() == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    for url in (checkpoints.url(f"{RANKS}?t=abc"), checkpoints.url(f"{RANKS}/?t=abc")):
        result = ema_ckpt.verify(url)
        assert result.status == "sound" and "abc" not in str(result)


def test_an_empty_directory_is_one_behind_a_mirror_too(server: Server) -> None:
    def mirror(handler: Handler) -> bool:
        if handler.path.startswith("/newest"):
            handler.answer(302, b"", "text/html", {"Location": "/x/newest/"})
        elif handler.path == "/x/newest/":
            handler.answer(200, b'<html>Index of x<a href="../">../</a></html>', "text/html")
        else:
            return False
        return True

    server.fault = mirror
    assert list_folder(server.url("newest"))[1:] == ((), ())


@pytest.mark.parametrize("path", [DCP, ONE_FILE, RANKS, f"{RANKS}/ema_rank0.pt"])
@pytest.mark.parametrize("lists_hidden", [True, False])
@pytest.mark.parametrize("type_", ["text/html", "application/json"])
def test_files_are_read_whatever_type_the_server_says(
    checkpoints: Server, type_: str, lists_hidden: bool, path: str
) -> None:
    usual_status = ema_ckpt.verify(checkpoints.url(path)).status
    checkpoints.lists_hidden = lists_hidden

    def typed(handler: Handler) -> bool:
        usual = handler.answer
        handler.answer = lambda status, body, kind, headers=None: usual(  # type: ignore[method-assign]
            status, body, kind if kind == "text/html" else type_, headers
        )
        return False

    checkpoints.fault = typed
    assert ema_ckpt.verify(checkpoints.url(path)).status == usual_status


def test_a_page_in_place_of_what_is_not_listed_is_no_verdict(checkpoints: Server) -> None:
    def log_in(handler: Handler) -> bool:
        if not handler.path.endswith(".metadata"):
            return False
        handler.answer(200, LOG_IN, "text/html")
        return True

    checkpoints.lists_hidden, checkpoints.fault = False, log_in
    with pytest.raises(AccessError, match="sends a page in its place") as caught:
        ema_ckpt.verify(checkpoints.url(DCP))
    assert caught.value.code == "unreadable"


def test_what_lists_nothing_and_is_no_page_is_no_empty_directory(checkpoints: Server) -> None:
    """A run that asks for the newest step and hears of none begins anew."""
    for body, kind in (*FOREIGN.values(), (b"", "text/plain"), (b"Busy", "text/plain")):

        def foreign(handler: Handler, body: bytes = body, kind: str = kind) -> bool:
            if handler.command == "HEAD" or handler.path.strip("/") != DCP:
                return False
            handler.answer(200, body, kind)
            return True

        checkpoints.fault = foreign
        for verb in (ema_ckpt.latest, ema_ckpt.verify):
            with pytest.raises(AccessError) as caught:
                verb(checkpoints.url(DCP))
            assert caught.value.code == "unreadable", body


def test_an_error_for_what_is_missing_is_no_damage_of_what_is_there(checkpoints: Server) -> None:
    """Some programs say with status 200 that there is no such file; of digests, there need be none."""

    def finds_nothing(handler: Handler) -> bool:
        if not handler.path.endswith("/ema_ckpt.json"):
            return False
        handler.answer(200, b'{"code": 404, "message": "no such file"}', "application/json")
        return True

    checkpoints.fault = finds_nothing
    with pytest.raises(AccessError) as caught:
        ema_ckpt.verify(checkpoints.url(DCP))
    assert caught.value.code == "unreadable"


LOG_IN = b'<!DOCTYPE html><form action="/login"><input type="password"></form><a href="/help">?</a>'


# Status 200 and something else than what was asked for, as proxies and programs send it.
FOREIGN = {
    "json": (b'{"error": "log in first"}', "application/json; charset=utf-8"),
    "json of php": (b'{"status": 401}', "text/html"),
    "problem": (b'{"type": "about:blank", "title": "?"}', "application/problem+json"),
    "byte order mark": (b"\xef\xbb\xbf<!DOCTYPE html><p>Maintenance</p>", "text/html"),
    "xhtml": (b'<?xml version="1.0"?><!DOCTYPE html><p>Maintenance</p>', "application/xhtml+xml"),
    "paragraph": (b"<p>Your session has expired.</p>", "text/html; charset=utf-8"),
    "words": (b"Your session has expired.", "text/html"),
    "xml": (b'<?xml version="1.0"?><Error><Code>ExpiredToken</Code></Error>', "application/xml"),
}


@pytest.mark.parametrize(
    ("way", "path"),
    [
        *itertools.product(("page", "redirect", "nothing"), (DCP, ONE_FILE)),
        ("json", DCP),
        *itertools.product(FOREIGN, (ONE_FILE, SHARDED)),
    ],
)
def test_a_page_to_log_in_is_no_verdict_whenever_it_comes(
    checkpoints: Server, path: str, way: str
) -> None:
    """From one request on it is all that comes, as where a session ends."""
    whole = ema_ckpt.verify(checkpoints.url(path)).status
    assert whole != "damaged"
    for allowed in range(len(checkpoints.requests)):
        checkpoints.requests.clear()

        def log_in(handler: Handler, allowed: int = allowed) -> bool:
            if len(handler.server.requests) <= allowed:
                return False
            if way in FOREIGN:
                handler.answer(200, *FOREIGN[way])
            elif (
                way != "redirect" or handler.path == "/login"
            ):  # that of a redirect need not ask at once
                page = LOG_IN if way == "page" else LOG_IN.replace(b"password", b"email")
                handler.answer(200, b"" if way == "nothing" else page, "text/html")
            else:
                handler.answer(302, b"", "text/html", {"Location": "/login"})
            return True

        checkpoints.fault = log_in
        try:
            found = ema_ckpt.verify(checkpoints.url(path)).status
        except ema_ckpt.EmaCkptError as error:
            found = error.code
        assert found in ("unreadable", "source-changed", whole), allowed
        assert found != whole or len(checkpoints.requests) <= allowed + 1


@pytest.mark.parametrize("status", [403, 404])
def test_a_server_without_pages_is_no_damage_of_a_file(
    fixtures: Path, tmp_path: Path, status: int
) -> None:
    shutil.copy(fixtures / RANKS / "ema_rank0.pt", tmp_path)
    with serving(tmp_path) as running:
        running.fault = lambda handler: handler.path == "/" and answer(handler, status)
        for verb in (ema_ckpt.verify, ema_ckpt.inspect):
            with pytest.raises(AccessError) as caught:
                verb(running.url("ema_rank0.pt"))
            assert caught.value.code == "unreadable"
        for absent in ("none", "none/none", "none/step_1", "none/ema_rank0.pt"):
            with pytest.raises(SourceError) as missing:
                ema_ckpt.inspect(running.url(absent))
            assert missing.value.code == "not-found"


@pytest.mark.parametrize("path", [DCP, ONE_FILE, RANKS])
def test_where_head_has_no_length_that_of_a_range_counts(
    checkpoints: Server, fixtures: Path, path: str
) -> None:
    checkpoints.fault = lambda handler: head_says(handler, None)
    result, local = ema_ckpt.verify(checkpoints.url(path)), ema_ckpt.verify(fixtures / path)
    assert (result.status, result.checked_bytes) == (local.status, local.checked_bytes)


def test_one_rank_is_told_from_a_folder_before_its_file_is_opened(
    fixtures: Path, tmp_path: Path
) -> None:
    """Once the file was read, the server refuses to say anything more of it."""
    shutil.copy(fixtures / RANKS / "ema_rank0.pt", tmp_path)
    was_read = False

    def refuses_later(handler: Handler) -> bool:
        nonlocal was_read
        if not handler.path.endswith(".pt"):
            return False
        span = handler.headers["Range"]
        if span is None:
            return was_read and answer(handler, 403)
        was_read = was_read or span != "bytes=0-0"
        return False

    with serving(tmp_path) as running:
        running.fault = refuses_later
        assert ema_ckpt.inspect(running.url("ema_rank0.pt")).tensors
    assert was_read


SECRETS = re.compile("alice|secret")


@pytest.mark.parametrize("status", [404, 403, 500])
def test_no_error_shows_credentials_however_it_is_printed(
    status: int, checkpoints: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Uncaught, an error is printed with those that it follows from, as the HTTP client raised them."""

    def fails(handler: Handler) -> bool:
        handler.send_response(status)
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    checkpoints.fault = fails
    for name in (ONE_FILE, DCP):
        url = checkpoints.url(f"{name}?token=secret", user="alice:secret@")
        calls: list[Callable[[], object]] = [
            lambda: ema_ckpt.open(url),
            lambda: ema_ckpt.verify(url),
            lambda: ema_ckpt.inspect(url),
            lambda: ema_ckpt.diff(url, url),
            lambda: list_folder(url),
        ]
        for call in calls:
            with pytest.raises(ema_ckpt.EmaCkptError) as caught:
                call()
            printed = "".join(traceback.format_exception(caught.value))
            assert not SECRETS.search(re.sub('(?m)^    .*|"secret"', "", printed)), printed
            assert not SECRETS.search(f"{caught.value.file} {caught.value!r}")
    assert not SECRETS.search(caplog.text)


def test_no_repr_shows_credentials(checkpoints: Server) -> None:
    url = checkpoints.url(f"{ONE_FILE}?token=secret", user="alice:secret@")
    with ema_ckpt.open(url) as opened:
        assert not SECRETS.search(repr(opened))
        assert "dtypes.safetensors" in repr(opened)
        assert opened.path == url, "it can be opened again"
    assert not SECRETS.search(repr(ema_ckpt.inspect(url)))
