"""What runs on the target: the agent, and all it does there."""
