"""What is run: training one model, and the side-by-side comparison."""
