"""Families of torch files, one for each rank."""
