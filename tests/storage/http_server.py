"""A web server on this machine that serves a directory, and can fail in the ways that servers do."""

from __future__ import annotations

import contextlib
import re
import threading
import urllib.parse
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Server(ThreadingHTTPServer):
    """Serves `root`. `fault` may answer a request itself: it is given the handler, and returns whether it did.

    Attributes:
        lists_hidden: whether its pages list names that begin with a dot, as those of nginx and Apache do not.
        honours_ranges: whether it sends the range that is asked for, or the whole file.
        sends_tags, sends_times: whether it sends entity tags, and the times of files.
        weakens_tags: whether the tags are weak ones.
        requests: "METHOD path" of every request, in order.
    """

    daemon_threads = True
    host = "127.0.0.1"

    def __init__(self, root: Path) -> None:
        super().__init__((self.host, 0), Handler)
        self.root = root
        self.fault: Callable[[Handler], bool] = lambda handler: False
        self.honours_ranges = self.lists_hidden = self.sends_tags = True
        self.sends_times = self.weakens_tags = False
        self.requests: list[str] = []

    def url(self, name: str = "", user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        if self.server.fault(self):
            return
        path = self.server.root / urllib.parse.unquote(self.path.partition("?")[0]).strip("/")
        if path.is_dir():
            inside = [p for p in path.iterdir() if self.server.lists_hidden or p.name[0] != "."]
            names = sorted(f"{p.name}/" if p.is_dir() else p.name for p in inside)
            page = "".join(f'<a href="{urllib.parse.quote(name)}">x</a>\n' for name in names)
            self.answer(200, f"<html>{page}</html>".encode(), "text/html")
        elif path.is_file():
            self.send_file(path)
        else:
            self.answer(404, b"not here", "text/plain")

    def send_file(self, path: Path) -> None:
        data, span = path.read_bytes(), _RANGE.fullmatch(self.headers.get("Range", ""))
        headers = {}
        if self.server.sends_tags:
            weak = "W/" if self.server.weakens_tags else ""
            headers["ETag"] = f'{weak}"{zlib.crc32(data):08x}"'
        if self.server.sends_times:  # finer than a second, so that a test need not wait for one
            headers["Last-Modified"] = str(path.stat().st_mtime_ns)
        if span is None or not self.server.honours_ranges:
            self.answer(200, data, "application/octet-stream", headers)
            return
        start, stop = int(span[1]), min(int(span[2]) + 1, len(data))
        self.answer(
            206,
            data[start:stop],
            "application/octet-stream",
            headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"},
        )

    def answer(
        self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def cut_short(self, status: int = 206) -> bool:
        """Announce more bytes than are sent, and close the connection."""
        self.send_response(status)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        self.wfile.write(b"x" * 10)
        self.close_connection = True
        return True

    def reset(self) -> bool:
        self.close_connection = True
        self.connection.close()
        return True


@contextlib.contextmanager
def serving(root: Path) -> Iterator[Server]:
    """Run a server of the directory `root` until the block ends."""
    server = Server(root)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
