"""The live model: which shards it has, and where they lie."""
