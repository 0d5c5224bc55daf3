"""The nouns (Catalog, WritePlan, Box) and pure functions on them. Opens no file."""
