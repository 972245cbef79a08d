"""Image and text towers, trained so that an image and its caption have similar embeddings."""
