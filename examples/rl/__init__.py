"""Proximal policy optimization on Gymnasium's CartPole, with rollouts in the workers."""
