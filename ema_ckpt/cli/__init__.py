"""The command line: parse, call the verb, render, exit code."""
