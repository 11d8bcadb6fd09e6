"""How a family of transformers is read: its modules, projections, rotation, masks and calls."""
