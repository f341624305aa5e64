"""Reinforcement learning by policy gradients: rewards of sampled answers move the policy."""
