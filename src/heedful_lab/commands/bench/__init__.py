"""`heedful bench`: time and memory of the operators: cases, measurement, a picture."""
