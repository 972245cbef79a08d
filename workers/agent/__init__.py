"""The stream between a node's agent, which is the process of its vault, and the controller."""
