"""Errors: what they name, and that nothing is lost where they travel between processes."""

from __future__ import annotations

import pickle

import pytest

from ema_ckpt.core.errors import EmaCkptError, SourceError, UnsafeError, about


@pytest.mark.parametrize("kind", [SourceError, UnsafeError])
def test_an_error_names_tensor_and_file_once(kind: type[EmaCkptError]) -> None:
    error = about(kind("hole", "3 of 4 elements"), tensor="w", file="a.pt")
    assert type(error) is kind
    assert (error.code, error.tensor, error.file) == ("hole", "w", "a.pt")
    assert str(error) == "a.pt: tensor 'w': 3 of 4 elements"
    assert str(about(error, tensor="w", file="a.pt")) == str(error)


def test_an_error_keeps_what_it_names_already() -> None:
    error = SourceError("x", "b.pt: 'v' is short", tensor="v", file="b.pt")
    again = about(error, tensor="v", file="b.pt", label="left", remedy="use another copy")
    assert (again.tensor, again.file) == ("v", "b.pt")
    assert str(again) == "left: b.pt: 'v' is short; use another copy"
    assert str(about(SourceError("x", "m"), tensor="o", kind="object")) == "object 'o': m"


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(SourceError("hole", "message", tensor="w", file="f")))
    assert type(error) is SourceError
    assert (str(error), error.code, error.tensor, error.file) == ("message", "hole", "w", "f")


def test_a_file_of_an_error_is_without_credentials_of_its_url() -> None:
    url = "https://me:secret@host/a.pt?X-Signature=abc"
    for error in (
        SourceError("not-found", "gone", file=url),
        about(SourceError("x", "m"), file=url),
    ):
        assert error.file == "https://***@host/a.pt?X-Signature=***"
        again = pickle.loads(pickle.dumps(error))
        assert again.file == error.file
    assert str(about(about(SourceError("x", "m"), file=url), file=url)).count("host") == 1
    assert SourceError("x", "m", file="model/a=b?c=d.pt").file == "model/a=b?c=d.pt"
