"""Parts that more than one mechanism uses."""
