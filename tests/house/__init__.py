"""Tests of the house: budgets, imports and packaging. They read the code and never train."""
