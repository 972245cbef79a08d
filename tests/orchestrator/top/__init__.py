"""`rayzero top`, against snapshots."""
