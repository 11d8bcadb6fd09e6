"""`heedful eval`: the same questions to several models, and the page about their answers."""
