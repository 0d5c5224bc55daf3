"""The rules of a call, if it has any. Nothing else of rules is loaded where it has none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ema_ckpt.core.errors import UsageError

if TYPE_CHECKING:
    from ema_ckpt.state_dicts.rules.rules import Rules


def chosen_rules(
    rules: str | os.PathLike[str] | Rules | None,
    values: Sequence[str] | Mapping[str, int] = (),
    *,
    inverse: bool = False,
) -> Rules | None:
    """Return the rules of a call: read from a file, or as they were given.

    Raises:
        UsageError: `usage` for options that go with rules alone, and for what is no rule;
            `not-found`.
    """
    if rules is None:
        if values or inverse:
            flag = "--rule-values" if values else "--inverse"
            raise UsageError("usage", f"{flag} goes with --rules")
        return None
    from ema_ckpt.state_dicts.rules.rule_file import load_rules
    from ema_ckpt.state_dicts.rules.rules import Rules

    if not isinstance(rules, Rules):
        return load_rules(rules, values, inverse=inverse)
    if values:
        raise UsageError("usage", "rule_values: the rules were read already; give them there")
    return rules.inverse if inverse else rules
