"""Runs a script as a job's training function: as `__main__`, again after each fault and resize."""
