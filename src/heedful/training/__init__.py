"""Training of converted models: losses and the Trainer."""
