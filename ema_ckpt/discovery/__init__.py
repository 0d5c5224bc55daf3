"""From a path to a catalog."""
