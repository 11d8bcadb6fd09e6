"""`heedful compare`: mechanisms side by side on small tasks, and the page about them."""
