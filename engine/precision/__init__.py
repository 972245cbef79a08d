"""Precision as objects: how main weights come from model weights and go back."""
