"""Scripts that tests launch as subprocesses."""
