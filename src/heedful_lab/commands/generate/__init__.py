"""`heedful generate`: write on from a prompt, and what the cache took."""
