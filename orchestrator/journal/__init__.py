"""A job's journal, next to its checkpoints, from which a lost run can be adopted."""
