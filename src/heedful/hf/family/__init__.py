"""Inspection of a transformers family: its modules, projections, rotation, masks and calls."""
