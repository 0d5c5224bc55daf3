"""Averages of a live model: schedules, shadows, update engines, swap."""
