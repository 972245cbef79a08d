"""All code that calls Ray."""
