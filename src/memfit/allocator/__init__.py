"""A replay of PyTorch's CUDA caching allocator, free of torch.

The planner replays the step that it simulates, the certifier the step that it traces.
"""
