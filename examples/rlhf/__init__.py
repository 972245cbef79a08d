"""Reinforcement learning from feedback on arithmetic: supervised, reward model, PPO, GRPO, DPO."""
