"""`heedful train`: a language model on text."""
