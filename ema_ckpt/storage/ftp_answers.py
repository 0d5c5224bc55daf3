"""Answers of FTP servers that say no, each kept apart from "there is no such file".

The client takes every one of them for an empty directory or a missing file, also that the server is
busy or that somebody may not look: what is there would seem to be gone, and a checkpoint damaged.
https://www.rfc-editor.org/rfc/rfc959 (4.2: 4yz is for now, 5yz for good)
"""

from __future__ import annotations

import re
from typing import Any

# Servers say with the same 550 that a file is not there; only the text tells the two apart.
_REFUSAL = re.compile(r"530|denied|permission|privilege|not allowed|forbidden", re.IGNORECASE)


class FtpTroubleError(Exception):
    """A server has not done what it was asked, and says nothing of what is there."""


def check_ftp(filesystem: Any) -> None:
    """Have a client raise FtpTroubleError for what may pass, PermissionError for a refusal."""
    connect = filesystem._connect

    def connect_checked() -> None:
        connect()
        _check(filesystem.ftp)

    filesystem._connect = connect_checked  # it connects anew where it has broken off an answer
    _check(filesystem.ftp)


def _check(client: Any) -> None:
    from ftplib import error_perm, error_proto, error_temp

    usual = client.getresp

    def getresp() -> str:
        try:
            answer: str = usual()
        except (error_temp, error_proto) as error:
            raise FtpTroubleError(str(error)) from error
        except error_perm as error:
            if _REFUSAL.search(str(error)):
                raise PermissionError(str(error)) from error
            raise
        return answer

    client.getresp = getresp
