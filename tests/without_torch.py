"""Run by the Python of an environment without torch: the training side says which extra is missing."""

import importlib.util

import ema_ckpt

assert importlib.util.find_spec("torch") is None, "torch came along"
try:
    ema_ckpt.save
except ema_ckpt.UsageError as error:
    assert error.code == "missing-extra", error.code
else:
    raise SystemExit("save without torch did not say missing-extra")
