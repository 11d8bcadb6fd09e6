"""The laboratory of heedful: its command line, tasks and studies; stands on the library."""
