"""Baselines of the studies that are not part of the library, on its public names."""
