"""The commands, a folder each: options, run, and the page, figures and numbers of their own."""
