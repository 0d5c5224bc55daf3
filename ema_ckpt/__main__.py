"""`python -m ema_ckpt`: the same as the command `ema-ckpt`."""

from ema_ckpt.cli.start import script

if __name__ == "__main__":
    script()
