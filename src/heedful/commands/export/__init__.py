"""`heedful export`: a converted model as a stock checkpoint."""
