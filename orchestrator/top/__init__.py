"""`rayzero top`: a job in a terminal, from the same JSON that the page shows."""
