"""Text that is shown: without credentials, and in time that grows with its length alone."""

from __future__ import annotations

import time

import pytest

from ema_ckpt.core.display import displayed, masked


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:secret@host/a.pt?X-Signature=abc&part=2", "https://***@host/a.pt?X-Signature=***&part=***"),
        ("https://u:p/w?q@host/x", "https://***@host/x"),
        ("s3://k:a+b/c@bucket/d.pt: no", "s3://***@bucket/d.pt: no"),
        ("simplecache::s3://k:s@b/x", "simplecache::s3://***@b/x"),
        ("http://u:p@h1/a,http://u2:p2@h2/b?x=1", "http://***@h1/a,http://***@h2/b?x=***"),
        ("http://h/a?u=http://x:y@z/&c=d).", "http://h/a?u=***&c=***)."),
        ("http://h?token", "http://h?***"),
        ("http://h/x;token=abc;v=2/y?z=1 more", "http://h/x;token=***;v=***/y?z=*** more"),
        ("'https:/me:secret@host/a'", "'https:/***@host/a'"),  # as a `pathlib.Path` has it
        ("https:/h/x?X-Amz-Signature=abc: no", "https:/h/x?X-Amz-Signature=***: no"),
    ],
)  # fmt: skip
def test_credentials_are_hidden(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "http://h:80/a@b",
        "http://[::1]:80/a",
        "/data/ab:/x@y;a=b",
        "C:/x@y",
        "tensor 'x': /a?b=c",
        "memory://x/y.pt, a;b=2",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "ab://" * 60_000,
        "ab://?" * 60_000,
        "ab://a@" * 60_000,
        "ab://a:b" * 60_000 + "@",
        "ab://" + ":1" * 100_000 + "@",
        "ab://" + ";a=b" * 60_000,
        "ab://x?a=" + ":" * 200_000 + "x",
        "a:" * 100_000 + ":/",
        "x" * 300_000 + ":/",
    ],
    ids=lambda text: text[:12],
)
def test_names_of_any_length_take_time_in_proportion(text: str) -> None:
    """A file may name a tensor so; quadratic, each of these took minutes."""
    begun = time.process_time()
    displayed(f"tensor '{text}': not here")
    assert time.process_time() - begun < 5
