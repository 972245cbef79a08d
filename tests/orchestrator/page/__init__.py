"""The page and `rayzero top`, against snapshots; the page in a real browser."""
