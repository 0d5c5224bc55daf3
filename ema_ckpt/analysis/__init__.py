"""Reading tensors to judge or combine them: compare, scan, check, average."""
