"""The processes of a job's roles: workers without ranks, each restarted alone."""
