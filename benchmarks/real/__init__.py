"""What a stranger sees of the product in real processes: start-up, memory, the demo."""
