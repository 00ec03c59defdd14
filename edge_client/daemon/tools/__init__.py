"""Tool calls in a chat: what a model's template has them look like, and how they are asked for and read."""
