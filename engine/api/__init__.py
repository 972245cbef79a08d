"""DeepSpeed's names over rayzero's engine. Scripts import them through `rayzero` or
`rayzero.deepspeed`."""
