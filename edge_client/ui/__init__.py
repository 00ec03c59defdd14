"""Terminal output: coloured text, the live view, the chat prompt."""
