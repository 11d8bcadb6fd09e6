"""`heedful calibrate`: what a policy must know of a model's queries."""
