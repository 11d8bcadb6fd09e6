"""`heedful budget`: how many tokens the cache of each layer needs."""
