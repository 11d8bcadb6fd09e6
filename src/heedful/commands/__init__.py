"""The commands, a room each: options, run, and the page, figures and numbers of their own."""
