"""Local S3 servers, and a proxy before one that counts requests, refuses, cuts, loses and stalls them."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.local_ports import free_port, wait_for_server

SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>"
)
DENIED = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code>'
    b"<Message>AccessDenied: not this one.</Message></Error>"
)
NOT_IMPLEMENTED = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>NotImplemented</Code>'
    b"<Message>A header you provided implies functionality that is not here.</Message></Error>"
)
INVALID = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>InvalidArgument</Code>'
    b"<Message>Invalid argument: uploads.</Message></Error>"
)
EMPTY_LISTING = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>'
    b"<Prefix></Prefix><KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys>"
    b"<IsTruncated>false</IsTruncated></ListBucketResult>"
)

LATER_LISTING = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>'
    b"<Prefix></Prefix><KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>true</IsTruncated>"
    b"<NextContinuationToken>later</NextContinuationToken></ListBucketResult>"
)

LOGIN_PAGE = b"<html><body>Please log in to use this network.</body></html>"

KEYS = ("access-key-of-nobody", "secret-key-of-nobody-at-all")


class S3Server:
    """moto, which keeps objects in memory, or nanio, which keeps them as files; in a process of its own."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.port = free_port()
        place = [f"--data-dir={folder}", "--host=127.0.0.1", "--log-level=error"]
        arguments = {
            "moto": ["moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            "nanio": ["nanio", "serve", *place, f"--port={self.port}", "--no-access-log"],
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments[kind]],
            env={**os.environ, "NANIO_ACCESS_KEY": KEYS[0], "NANIO_SECRET_KEY": KEYS[1]},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_server(self._process, self.port)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Request:
    """A request as the proxy sees it, and its number among those of its kind."""

    def __init__(
        self, method: str, target: str, nbytes: int, number: int, payer: str | None = None
    ) -> None:
        split = urlsplit(target)
        self.payer = payer
        self.method, self.path, self.nbytes, self.number = method, split.path, nbytes, number
        self.query = parse_qs(split.query, keep_blank_values=True)

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber" in self.query


Rule = Callable[[Request], str | None]


class Proxy:
    """Passes requests on to a server, unless its rule says `slow`, `refuse`, `cut`, `lose` or `stall`.

    `slow` answers 503 SlowDown, `refuse` 403 AccessDenied, `lack` 501 NotImplemented, `invalid` 400 InvalidArgument, `garble` passes on and answers 200 with the beginning of some XML, `blanks` what comes with blanks before it, `unlisted` a page of nothing, `later` an empty page before the one with the answer, `page` 200 and a page of a proxy's own, `nothing` 200 and no more, `cut` closes the connection, `lose` passes on and loses the answer, `stall` waits
    until the proxy is stopped.
    """

    def __init__(self, port: int) -> None:
        self.requests: list[Request] = []
        self.rule: Rule = lambda request: None
        self.stalled = threading.Event()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._later: list[Any] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    body = b""
                    while size := int(self.rfile.readline().split(b";")[0], 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                with proxy._lock:
                    request = Request(
                        self.command,
                        self.path,
                        len(body),
                        0,
                        self.headers.get("x-amz-request-payer"),
                    )
                    alike = [r for r in proxy.requests if r.method == request.method]
                    request.number = sum(r.is_part == request.is_part for r in alike)
                    proxy.requests.append(request)
                what = proxy.rule(request)
                if "later" in request.query.get("continuation-token", ()):
                    self._answer(*proxy._later.pop())
                elif what == "slow":
                    self._answer(503, [("Content-Type", "application/xml")], SLOW_DOWN)
                elif what == "refuse":
                    self._answer(403, [("Content-Type", "application/xml")], DENIED)
                elif what == "lack":
                    self._answer(501, [("Content-Type", "application/xml")], NOT_IMPLEMENTED)
                elif what == "invalid":
                    self._answer(400, [("Content-Type", "application/xml")], INVALID)
                elif what == "unlisted":
                    self._answer(200, [("Content-Type", "application/xml")], EMPTY_LISTING)
                elif what == "page":
                    length = [("Content-Length", str(len(LOGIN_PAGE)))] * (self.command == "HEAD")
                    self._answer(200, [("Content-Type", "text/html"), *length], LOGIN_PAGE)
                elif what == "nothing":
                    self._answer(200, [], b"")
                elif what == "cut":
                    self._hang_up()
                elif what == "stall":
                    proxy.stalled.set()
                    proxy._stopped.wait()
                    self._hang_up()
                else:
                    self._pass_on(body, what)

            def _pass_on(self, body: bytes, what: str | None) -> None:
                headers = {k: v for k, v in self.headers.items() if k != "Transfer-Encoding"}
                headers["Content-Length"] = str(len(body))
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                try:
                    connection.request(self.command, self.path, body, headers)
                    answer = connection.getresponse()
                    data = answer.read()
                    kept = [
                        (k, v)
                        for k, v in answer.getheaders()
                        if k.lower() not in ("transfer-encoding", "connection", "date", "server")
                        and (k.lower() != "content-length" or self.command == "HEAD")
                    ]
                    if what == "blanks" and answer.status == 200:
                        data = b" \n " + data
                    if what == "garble":
                        self._answer(200, [("Content-Type", "application/xml")], b"<Result><Ke")
                    elif what == "lose":
                        self._hang_up()
                    elif what == "later":
                        proxy._later.append((answer.status, kept, data))
                        self._answer(200, [("Content-Type", "application/xml")], LATER_LISTING)
                    else:
                        self._answer(answer.status, kept, data)
                finally:
                    connection.close()

            def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                if self.command != "HEAD" and status != 204:
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def _hang_up(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

        class Server(ThreadingHTTPServer):
            def handle_error(self, *args: Any) -> None:
                pass  # a client that was killed

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def parts(self) -> int:
        """How many parts were sent through it."""
        return sum(request.is_part for request in self.requests)

    def release(self) -> None:
        """End what stalls."""
        self._stopped.set()

    def reset(self) -> None:
        """Pass everything on again, and be able to stall again."""
        self.rule = lambda request: None
        self.stalled.clear()
        self._stopped.clear()
        self.requests.clear()

    def stop(self) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()
