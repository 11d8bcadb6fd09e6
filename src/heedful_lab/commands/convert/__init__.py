"""`heedful convert`: a mechanism into a folder and out of it."""
