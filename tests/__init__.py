"""The tests, which mirror the packages; `tests.support` holds what they share."""
