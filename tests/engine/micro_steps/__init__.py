"""DeepSpeed's micro-step contract: loops, what DeepSpeed does in them, and what rayzero does."""
