"""A small cache on a model of transformers as it is, unconverted."""
