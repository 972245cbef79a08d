"""The local optimizer over this rank's shards, and learning-rate schedules."""
