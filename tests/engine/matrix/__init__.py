"""Every combination of what an engine config chooses, against plain torch, many in one process."""
