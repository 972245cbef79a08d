"""Programs that tests start as a user would."""
