"""A job's life in a cluster: its actor, its clients and what is kept of it."""
