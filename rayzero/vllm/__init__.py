"""Adapters to vLLM, of which rayzero is no part: nothing in `engine`, `workers` and `orchestrator`
imports this package. It needs vLLM 0.28 or newer: `rayzero[vllm]`."""
