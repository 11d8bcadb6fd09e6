"""The studies behind the numbers of the documentation, one folder each."""
