"""From a write plan to published files."""
