"""`heedful inspect`: one page about a model at work on a text."""
