"""Rules for names and layouts: one state dict becomes another, and no byte of it is read."""
