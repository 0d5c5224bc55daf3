"""Places in results: paths and URLs as they may be printed."""

from __future__ import annotations

from ema_ckpt.core.display import masked


def hide_credentials(result: object, *fields: str) -> None:
    """Mask the URLs in `fields` of a frozen result, each a text or a tuple of texts."""
    for field in fields:
        value = getattr(result, field)
        hidden = masked(value) if isinstance(value, str) else tuple(map(masked, value))
        object.__setattr__(result, field, hidden)
