"""`heedful shrink`: from a model to a folder whose cache takes a part of the bytes."""
