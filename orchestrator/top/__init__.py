"""`rayzero top`: a job in a terminal, from the same JSON as its page."""
