"""transformers, accelerate, TRL and PEFT over rayzero, as their users start them."""
