"""BERT for sequence classification: predicts the kind of a snippet of Python source."""
