"""The Grafana dashboard as rows of data, and what writes them as Grafana's JSON.

`python -m rayzero.orchestrator.metrics.dashboard` writes it into the chart. No torch, no Ray.
"""
