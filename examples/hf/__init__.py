"""transformers' Trainer with a LoRA adapter of PEFT, unchanged, on rayzero."""
