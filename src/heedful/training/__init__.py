"""What people train converted models with: losses and the Trainer."""
