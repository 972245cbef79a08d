"""A small residual network that reads scikit-learn's handwritten digits."""
