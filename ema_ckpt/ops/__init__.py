"""One verb a file: a function that takes a path and returns a frozen result."""
