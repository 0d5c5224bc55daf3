"""What the tensors of a catalog mean: trees, roles, averages, ties, selections."""
