"""Grafana's dashboard as data."""
