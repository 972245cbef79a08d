"""A job's journal beside its checkpoints, from which a lost run can be adopted."""
