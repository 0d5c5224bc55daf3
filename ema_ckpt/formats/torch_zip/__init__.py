"""The zip archives that torch.save writes."""
